// A text and its words. How a piece between white space is split into words is asked of somebody
// else (spaCy's rules, in Python) and remembered: most pieces of a text were seen before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "characters.h"
#include "xxh64.h"

namespace trainkit {

struct Word {
    std::uint32_t start;   // bytes
    std::uint32_t size;    // bytes
    std::uint32_t points;  // code points
};

// Splits known pieces; pieces of ASCII letters alone are words of their own unless they were
// declared to be exceptions.
class PieceMemory {
  public:
    static constexpr std::size_t kMost = std::size_t{1} << 20;

    explicit PieceMemory(const std::vector<std::string>& exceptions) {
        for (const std::string& piece : exceptions)
            exceptions_[xxh64(piece.data(), piece.size())] = true;
    }

    // The sizes of a piece's words in bytes, which sum to the piece's; nullptr: not known.
    const std::vector<std::uint32_t>* find(std::string_view piece) {
        const std::uint64_t key = xxh64(piece.data(), piece.size());
        const auto found = known_.find(key);
        if (found != known_.end())
            return &found->second;
        if (!letters(piece) || exceptions_.count(key) != 0)
            return nullptr;
        whole_.assign(1, static_cast<std::uint32_t>(piece.size()));
        return &whole_;
    }

    void learn(std::string_view piece, std::vector<std::uint32_t> sizes) {
        known_[xxh64(piece.data(), piece.size())] = std::move(sizes);
    }

    // Forget all if there is too much of it: to be called between texts.
    void bound() {
        if (known_.size() > kMost)
            known_.clear();
    }

  private:
    static bool letters(std::string_view piece) {
        for (const char byte : piece) {
            const int lower = byte | 0x20;
            if (lower < 'a' || lower > 'z')
                return false;
        }
        return true;
    }

    std::unordered_map<std::uint64_t, bool> exceptions_;
    std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> known_;
    std::vector<std::uint32_t> whole_;
};

// Pieces of `text` that `memory` does not know, each once.
inline std::vector<std::string_view> unknown_pieces(const Characters& characters,
                                                    PieceMemory& memory, std::string_view text) {
    std::unordered_map<std::string_view, bool> found;
    characters.walk(
        text,
        [&](std::size_t start, std::size_t size) {
            const std::string_view piece = text.substr(start, size);
            if (memory.find(piece) == nullptr)
                found.emplace(piece, true);
        },
        [](std::size_t, std::size_t) {});
    std::vector<std::string_view> pieces;
    pieces.reserve(found.size());
    for (const auto& [piece, _] : found)
        pieces.push_back(piece);
    return pieces;
}

// Words of a text of which all pieces are known. `on_word` takes each; `on_space` runs of white
// space that stand for a word of their own in spaCy: all but a single space behind a word.
template <typename OnWord, typename OnSpace>
void each_word(const Characters& characters, PieceMemory& memory, std::string_view text,
               OnWord on_word, OnSpace on_space) {
    characters.walk(
        text,
        [&](std::size_t start, std::size_t size) {
            for (const std::uint32_t part : *memory.find(text.substr(start, size))) {
                on_word(text.substr(start, part), start);
                start += part;
            }
        },
        [&](std::size_t start, std::size_t size) {
            if (size > 1 || text[start] != ' ' || start == 0)
                on_space();
        });
}

inline std::vector<Word> split_words(const Characters& characters, PieceMemory& memory,
                                     std::string_view text) {
    std::vector<Word> words;
    words.reserve(text.size() / 5);
    each_word(
        characters, memory, text,
        [&](std::string_view word, std::size_t start) {
            words.push_back({static_cast<std::uint32_t>(start),
                             static_cast<std::uint32_t>(word.size()),
                             static_cast<std::uint32_t>(count_points(word))});
        },
        [] {});
    return words;
}

}  // namespace trainkit

// A text and its words. How a piece between white space is split into words is asked of somebody
// else (spaCy's rules, in Python) and remembered: most pieces of a text were seen before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "characters.h"
#include "english.h"
#include "xxh64.h"

namespace trainkit {

struct Word {
    std::uint32_t start;   // bytes
    std::uint32_t size;    // bytes
    std::uint32_t points;  // code points
};

// How pieces are split: those that were asked for, and those of ASCII letters alone, which are
// words of their own unless they were declared to be exceptions.
class PieceMemory {
  public:
    struct Sizes {
        const std::uint32_t* first;  // of each word, in bytes; nullptr: the piece is not known
        std::size_t count;
    };

    explicit PieceMemory(bool english) : english_(english), likely_(kFilter) { forget(); }

    // A piece that is split otherwise than it looks.
    void except(std::string_view piece, const EnglishRules::Sizes& sizes) {
        exceptions_.emplace(xxh64(piece.data(), piece.size()), sizes);
        likely_[looks(piece)] = true;
    }

    // Forget all if it is much; not within a text, of which all pieces have to be known.
    void bound() {
        if (known_ > kMost)
            forget();
    }

    // `letters`: the piece is of letters of ASCII alone. Valid until the next call.
    Sizes find(std::string_view piece, bool letters) {
        if (likely_[looks(piece)]) {
            const auto found = exceptions_.find(xxh64(piece.data(), piece.size()));
            if (found != exceptions_.end())
                return {found->second.data(), found->second.size()};
        }
        if (letters) {
            whole_ = static_cast<std::uint32_t>(piece.size());
            return {&whole_, 1};
        }
        const Entry& entry = entries_[slot(xxh64(piece.data(), piece.size()))];
        if (entry.count == 0) {
            if (!english_ || !EnglishRules::split(piece, exceptions_, split_))
                return {nullptr, 0};
            learn(piece, split_);
            return {split_.data(), split_.size()};
        }
        return {sizes_.data() + entry.first, entry.count};
    }

    void learn(std::string_view piece, const std::vector<std::uint32_t>& sizes) {
        if (2 * known_ >= entries_.size())
            grow();
        const std::uint64_t key = xxh64(piece.data(), piece.size());
        Entry& entry = entries_[slot(key)];
        known_ += entry.count == 0;
        entry = {key, static_cast<std::uint32_t>(sizes_.size()),
                 static_cast<std::uint32_t>(sizes.size())};
        sizes_.insert(sizes_.end(), sizes.begin(), sizes.end());
    }

  private:
    static constexpr std::size_t kMost = std::size_t{1} << 19;
    static constexpr std::size_t kFilter = std::size_t{1} << 16;

    struct Entry {
        std::uint64_t key;
        std::uint32_t first;
        std::uint32_t count;  // 0: free
    };

    std::size_t slot(std::uint64_t key) const {
        const std::size_t mask = entries_.size() - 1;
        std::size_t at = key & mask;
        while (entries_[at].count != 0 && entries_[at].key != key)
            at = (at + 1) & mask;
        return at;
    }

    void forget() {
        entries_.assign(kFilter, Entry{0, 0, 0});
        sizes_.clear();
        known_ = 0;
    }

    void grow() {
        std::vector<Entry> before(2 * entries_.size(), Entry{0, 0, 0});
        before.swap(entries_);
        for (const Entry& entry : before) {
            if (entry.count != 0)
                entries_[slot(entry.key)] = entry;
        }
    }

    // Of some letters and the size: few words look like an exception.
    static std::size_t looks(std::string_view piece) {
        std::size_t looks = piece.size();
        for (const std::size_t at : {std::size_t{0}, piece.size() / 2, piece.size() - 1})
            looks = 31 * looks + static_cast<std::uint8_t>(piece[at]);
        return looks % kFilter;
    }

    bool english_;
    std::vector<std::uint32_t> split_;
    EnglishRules::Exceptions exceptions_;
    std::vector<bool> likely_;  // what looks like them
    std::vector<Entry> entries_;
    std::vector<std::uint32_t> sizes_;
    std::size_t known_ = 0;
    std::uint32_t whole_ = 0;
};

// Words of a text: `on_word` takes each, where it starts, and whether it is of letters of ASCII
// alone; `on_space` runs of white space that stand for a word of their own in spaCy: all but a
// single space behind a word. Pieces that are not known are passed over, and returned, each once.
template <typename OnWord, typename OnSpace>
std::vector<std::string_view> each_word(const Characters& characters, PieceMemory& memory,
                                        std::string_view text, OnWord on_word, OnSpace on_space) {
    std::unordered_set<std::string_view> unknown;
    characters.walk(
        text,
        [&](std::size_t start, std::size_t size, std::size_t others) {
            const PieceMemory::Sizes parts = memory.find(text.substr(start, size), others == 0);
            if (parts.first == nullptr)
                unknown.insert(text.substr(start, size));
            for (std::size_t i = 0; i < parts.count; ++i) {
                on_word(text.substr(start, parts.first[i]), start, others == 0);
                start += parts.first[i];
            }
        },
        [&](std::size_t start, std::size_t size) {
            if (size > 1 || text[start] != ' ' || start == 0)
                on_space();
        });
    return {unknown.begin(), unknown.end()};
}

// Fills `words`; returns the pieces that are not known, as `each_word`.
inline std::vector<std::string_view> split_words(const Characters& characters, PieceMemory& memory,
                                                 std::string_view text, std::vector<Word>& words) {
    words.clear();
    words.reserve(text.size() / 5);
    return each_word(
        characters, memory, text,
        [&](std::string_view word, std::size_t start, bool letters) {
            const std::size_t points = letters ? word.size() : count_points(word);
            words.push_back({static_cast<std::uint32_t>(start),
                             static_cast<std::uint32_t>(word.size()),
                             static_cast<std::uint32_t>(points)});
        },
        [] {});
}

}  // namespace trainkit

// Repeated lines, paragraphs and n-grams of a text, as datatrove's GopherRepetitionFilter counts
// them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "characters.h"
#include "words.h"
#include "xxh64.h"

namespace trainkit {

// A set of hashes that counts: open addressing, cleared for each use.
class HashCounts {
  public:
    struct Entry {
        std::uint64_t hash;
        std::uint32_t count;  // 0: free
    };

    void clear(std::size_t most) {
        std::size_t size = 16;
        while (size < 2 * most)
            size *= 2;
        entries_.assign(size, Entry{0, 0});
    }

    // Count one more; returns the count with it.
    std::uint32_t add(std::uint64_t hash) {
        const std::size_t mask = entries_.size() - 1;
        std::size_t at = (hash * 0x9E3779B97F4A7C15u) >> 20 & mask;
        while (entries_[at].count != 0 && entries_[at].hash != hash)
            at = (at + 1) & mask;
        entries_[at].hash = hash;
        return ++entries_[at].count;
    }

    std::uint32_t of(std::uint64_t hash) const {
        const std::size_t mask = entries_.size() - 1;
        std::size_t at = (hash * 0x9E3779B97F4A7C15u) >> 20 & mask;
        while (entries_[at].count != 0 && entries_[at].hash != hash)
            at = (at + 1) & mask;
        return entries_[at].count;
    }

  private:
    std::vector<Entry> entries_;
};

struct Repeats {
    std::size_t elements = 0;  // second and later occurrences
    std::size_t points = 0;    // their code points
};

inline Repeats repeats(const std::vector<std::string_view>& elements, HashCounts& seen) {
    Repeats found;
    seen.clear(elements.size());
    for (const std::string_view element : elements) {
        if (seen.add(xxh64(element.data(), element.size())) > 1) {
            found.elements += 1;
            found.points += count_points(element);
        }
    }
    return found;
}

// re.split("\n{n,}", text)
inline std::vector<std::string_view> split_at_feeds(std::string_view text, std::size_t n) {
    std::vector<std::string_view> parts;
    std::size_t start = 0;
    for (std::size_t at = 0; at < text.size();) {
        if (text[at] != '\n') {
            ++at;
            continue;
        }
        std::size_t end = at;
        while (end < text.size() && text[end] == '\n')
            ++end;
        if (end - at >= n) {
            parts.push_back(text.substr(start, at - start));
            start = end;
        }
        at = end;
    }
    parts.push_back(text.substr(start));
    return parts;
}

// Hashes of n-grams: polynomials modulo 2^61-1 of their bytes, so that each follows from two
// prefixes of the text.
class Grams {
  public:
    // `spaces`: words are joined by one; else "ab c" and "a bc" are the same.
    Grams(std::string_view text, const std::vector<Word>& words, bool spaces) {
        prefix_.reserve(words.size() + 1);
        ends_.reserve(words.size() + 1);
        prefix_.push_back(0);
        ends_.push_back(0);
        points_.push_back(0);
        std::uint64_t hash = 0;
        for (const Word& word : words) {
            for (const char byte : text.substr(word.start, word.size))
                hash = reduce(multiply(hash, kBase) + static_cast<std::uint8_t>(byte) + 1);
            if (spaces)
                hash = reduce(multiply(hash, kBase) + ' ' + 1);
            prefix_.push_back(hash);
            ends_.push_back(ends_.back() + word.size + (spaces ? 1 : 0));
            points_.push_back(points_.back() + word.points);
        }
    }

    std::size_t count(std::size_t n) const { return prefix_.size() > n ? prefix_.size() - n : 0; }

    // Of the words from `first` on, `n` of them.
    std::uint64_t hash(std::size_t first, std::size_t n) {
        const std::size_t size = ends_[first + n] - ends_[first];
        while (powers_.size() <= size)
            powers_.push_back(multiply(powers_.back(), kBase));
        return reduce(prefix_[first + n] + kPrime - multiply(prefix_[first], powers_[size]));
    }

    // Their code points, without spaces.
    std::size_t points(std::size_t first, std::size_t n) const {
        return points_[first + n] - points_[first];
    }

  private:
    static constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;
    static constexpr std::uint64_t kBase = 0x1C8E4D5A7B3F9621u;

    static std::uint64_t reduce(std::uint64_t value) {
        value = (value & kPrime) + (value >> 61);
        return value >= kPrime ? value - kPrime : value;
    }

    static std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
        const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
        return reduce((static_cast<std::uint64_t>(product) & kPrime) +
                      static_cast<std::uint64_t>(product >> 61));
    }

    std::vector<std::uint64_t> prefix_;
    std::vector<std::size_t> ends_;
    std::vector<std::size_t> points_;
    std::vector<std::uint64_t> powers_{1};
};

// Code points of all occurrences of the most frequent n-gram, the first of equals.
inline std::size_t top_gram_points(Grams& grams, std::size_t n, HashCounts& counts) {
    const std::size_t count = grams.count(n);
    counts.clear(count);
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < count; ++i)
        most = std::max(most, counts.add(grams.hash(i, n)));
    for (std::size_t i = 0; i < count; ++i) {
        if (counts.of(grams.hash(i, n)) == most)
            return (grams.points(i, n) + n - 1) * most;
    }
    return 0;
}

// Code points of n-grams that stood before, from left to right; one that did is passed whole.
inline std::size_t repeated_gram_points(Grams& grams, std::size_t n, HashCounts& seen) {
    const std::size_t count = grams.count(n);
    seen.clear(count);
    std::size_t points = 0;
    for (std::size_t i = 0; i < count;) {
        const std::uint64_t hash = grams.hash(i, n);
        if (seen.of(hash) != 0) {
            points += grams.points(i, n);
            i += n;
        } else {
            seen.add(hash);
            ++i;
        }
    }
    return points;
}

}  // namespace trainkit

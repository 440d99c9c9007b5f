// MinHash as datatrove 0.10 does it, bit for bit: 64-bit shingles by XXH64, (shingle * a + b)
// modulo 2^64 and then modulo 2^61-1, the least over the shingles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "words.h"
#include "xxh64.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TRAINKIT_WIDE __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define TRAINKIT_WIDE
#endif

namespace trainkit {

constexpr std::int64_t kMersenne = (std::int64_t{1} << 61) - 1;

// Lowers `least` to the values of one block of shingles. Values are below 2^62, so signed ones
// compare the same, which every vector unit can do.
TRAINKIT_WIDE inline void lower_values(const std::uint64_t* shingles, std::size_t count,
                                       const std::uint64_t* a, const std::uint64_t* b,
                                       std::int64_t* least, std::size_t hashes) {
    const auto value = [&](std::uint64_t shingle, std::size_t i) {
        const std::uint64_t product = shingle * a[i] + b[i];
        const auto value = static_cast<std::int64_t>((product & kMersenne) + (product >> 61));
        return value >= kMersenne ? value - kMersenne : value;
    };
    for (std::size_t s = 0; s < count; s += 2) {  // by twos: `least` is read half as often
        const std::uint64_t first = shingles[s];
        const std::uint64_t second = shingles[std::min(s + 1, count - 1)];
        for (std::size_t i = 0; i < hashes; ++i)
            least[i] = std::min(least[i], std::min(value(first, i), value(second, i)));
    }
}

// Hashes of all n-grams of words, joined by a space, of a simplified text: words in it follow one
// another, or there is one space between.
inline std::vector<std::uint64_t> shingles(std::string_view text, const std::vector<Word>& words,
                                           std::size_t n) {
    std::string joined;
    joined.reserve(text.size() + words.size());
    std::vector<std::size_t> starts;
    starts.reserve(words.size() + 1);
    std::size_t copied = 0;  // of the text
    std::size_t end = 0;     // of the word before
    for (const Word& word : words) {
        if (word.start == end && end != 0) {
            joined += text.substr(copied, end - copied);
            joined += ' ';
            copied = end;
        }
        starts.push_back(joined.size() + word.start - copied);
        end = word.start + word.size;
    }
    joined += text.substr(copied);
    starts.push_back(joined.size() + 1);
    std::vector<std::uint64_t> hashes;
    hashes.reserve(words.size());
    for (std::size_t i = 0; i + n <= words.size(); ++i)
        hashes.push_back(xxh64(joined.data() + starts[i], starts[i + n] - 1 - starts[i]));
    return hashes;
}

class MinHash {
  public:
    MinHash(std::size_t n, std::vector<std::uint64_t> a, std::vector<std::uint64_t> b)
        : n_(n), a_(std::move(a)), b_(std::move(b)) {}

    // Nothing of a text of fewer words than a shingle has.
    std::vector<std::int64_t> operator()(std::string_view text,
                                         const std::vector<Word>& words) const {
        const std::vector<std::uint64_t> found = shingles(text, words, n_);
        if (found.empty())
            return {};
        std::vector<std::int64_t> least(a_.size(), kMersenne);
        lower_values(found.data(), found.size(), a_.data(), b_.data(), least.data(), a_.size());
        return least;
    }

  private:
    std::size_t n_;
    std::vector<std::uint64_t> a_, b_;
};

}  // namespace trainkit

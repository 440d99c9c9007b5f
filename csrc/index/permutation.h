// A keyed permutation of [0, n) with random access: the order of samples without a shuffled array
// in memory.
//
// Construction: the generalized Feistel network of Black and Rogaway ("Ciphers with Arbitrary
// Finite Domains", CT-RSA 2002, method 3). A position is written as left * cols + right in a grid
// of rows x cols cells, rows and cols about sqrt(n). Even rounds add F(right) to the left part
// modulo rows, odd rounds add F(left) to the right part modulo cols. A result outside [0, n) is
// encrypted again until it lands inside (cycle walking). The grid has at most sqrt(n) + 2 cells too
// many (but never fewer than 16 cells), so walks of more than one step are rare; a network over the
// next power of two would walk almost twice where n is just above one. rows is even, because rounds
// on an odd x odd grid make even permutations only.
//
// Round function: the high word of mix13(part ^ round_key) * size, a value in [0, size) without
// division (Lemire, "Fast Random Integer Generation in an Interval", 2019; no rejection: the bias
// is size / 2^64 < 2^-32). mix13 is the finalizer of SplitMix64 (variant 13 of D. Stafford, "Better
// Bit Mixing", 2011); the round keys are SplitMix64's output from the state `key` (Steele, Lea,
// Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
//
// Rounds: four make a strong pseudo-random permutation from ideal round functions (Luby and
// Rackoff, 1988); ten, as in NIST SP 800-38G's FF1, because the parts of a tiny n have few values:
// with ten and 16 cells all n! orders come up equally often (chi-square, n <= 9). This shuffles
// data; it is no cipher.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace trainkit {

constexpr int kRounds = 10;  // even: rounds come in pairs
// rows and cols stay at 2^31 or below: no product overflows
constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 62;

constexpr std::uint64_t kMinPart = 4;  // rows and cols at least

inline std::uint64_t mix13(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

class Permutation {
  public:
    // 1 <= n <= kMaxSize; the caller checks.
    Permutation(std::uint64_t n, std::uint64_t key)
        : n_(n),
          rows_(even(std::max(kMinPart, ceil_sqrt(n)))),
          cols_(std::max(kMinPart, (n + rows_ - 1) / rows_)) {
        for (int round = 0; round < kRounds; ++round) {
            keys_[round] =
                mix13(key + (static_cast<std::uint64_t>(round) + 1) * 0x9e3779b97f4a7c15u);
        }
    }

    // out[i] = where position start + i goes, for i < count; start + count <= n.
    template <typename Integer>
    void fill(std::uint64_t start, std::uint64_t count, Integer* out) const {
        // counted on below: one division a call, not one an element
        std::uint64_t left = start / cols_, right = start % cols_;
        for (std::uint64_t i = 0; i < count; ++i) {
            out[i] = static_cast<Integer>(walk(left, right));
            if (++right == cols_) {
                right = 0;
                ++left;
            }
        }
    }

  private:
    static std::uint64_t ceil_sqrt(std::uint64_t n) {
        // off by one at most, put right below
        auto root = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(n)));
        while (root * root < n)
            ++root;
        while ((root - 1) * (root - 1) >= n)
            --root;
        return root;
    }

    static std::uint64_t even(std::uint64_t value) { return value + value % 2; }

    static std::uint64_t round_value(std::uint64_t part, std::uint64_t key, std::uint64_t size) {
        return static_cast<std::uint64_t>(
            static_cast<unsigned __int128>(mix13(part ^ key)) * size >> 64);
    }

    static std::uint64_t add_modulo(std::uint64_t a, std::uint64_t b, std::uint64_t size) {
        const std::uint64_t sum = a + b;
        return sum >= size ? sum - size : sum;
    }

    std::uint64_t walk(std::uint64_t left, std::uint64_t right) const {
        std::uint64_t value;
        do {
            for (int round = 0; round < kRounds; round += 2) {
                left = add_modulo(left, round_value(right, keys_[round], rows_), rows_);
                right = add_modulo(right, round_value(left, keys_[round + 1], cols_), cols_);
            }
            value = left * cols_ + right;
        } while (value >= n_);
        return value;
    }

    std::uint64_t n_, rows_, cols_;
    std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace trainkit

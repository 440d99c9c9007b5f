// numpy's legacy random stream: MT19937 (Matsumoto and Nishimura, 1998; seeded by init_genrand of
// 2002) and the draws of RandomState.shuffle.
//
// RandomState.shuffle (numpy/random/mtrand.pyx) is: for i = n - 1 down to 1, swap element i with
// element j, j drawn from [0, i]. A draw (random_interval, distributions.c): outputs masked by the
// smallest 2^b - 1 >= i until one is <= i; above 2^32 - 1 an output is two 32-bit ones, the first
// in the high half.
//
// Same numbers, other costs: outputs come in blocks of 624, a draw is accepted without a branch,
// and the elements of the next batch of draws are prefetched while those of this one are swapped,
// because every swap in a large array is a miss of the cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace trainkit {

class Mt19937 {
  public:
    explicit Mt19937(std::uint32_t seed) {
        for (std::uint32_t i = 0; i < kState; ++i) {
            state_[i] = seed;
            seed = 1812433253u * (seed ^ (seed >> 30)) + i + 1;
        }
    }

    std::uint32_t next() {
        if (position_ == kState)
            refill();
        return outputs_[position_++];
    }

    std::uint64_t next64() {
        const std::uint64_t high = next();
        return high << 32 | next();
    }

    // out[k] = a draw from [0, highest - k], k < count; count <= highest < 2^32.
    void draw(std::uint64_t highest, std::size_t count, std::uint32_t* out) {
        std::size_t k = 0;
        while (k < count) {
            const auto bound = static_cast<std::uint32_t>(highest - k);
            const std::uint32_t mask = smallest_mask(bound);
            // as long as the bounds share this mask
            const std::size_t end = k + std::min<std::size_t>(count - k, bound - (mask >> 1));
            while (k < end) {
                if (position_ == kState)
                    refill();
                // were all accepted, out[end - 1] would be the last
                const std::size_t tries = std::min<std::size_t>(kState - position_, end - k);
                const std::uint32_t* const outputs = outputs_.data() + position_;
                auto last = static_cast<std::uint32_t>(highest - k);
                std::uint32_t* next = out + k;
                for (std::size_t t = 0; t < tries; ++t) {
                    const std::uint32_t value = outputs[t] & mask;
                    const std::uint32_t accepted = value <= last;
                    *next = value;
                    next += accepted;
                    last -= accepted;
                }
                k = static_cast<std::size_t>(next - out);
                position_ += tries;
            }
        }
    }

    // The same from 64-bit outputs, any highest.
    void draw(std::uint64_t highest, std::size_t count, std::uint64_t* out) {
        for (std::size_t k = 0; k < count; ++k) {
            const std::uint64_t bound = highest - k;
            const std::uint64_t mask = smallest_mask(bound);
            do {
                out[k] = next64() & mask;
            } while (out[k] > bound);
        }
    }

  private:
    static constexpr std::size_t kState = 624, kShift = 397;

    template <typename Integer>
    static Integer smallest_mask(Integer value) {
        for (unsigned shift = 1; shift < 8 * sizeof(Integer); shift *= 2)
            value |= value >> shift;
        return value;
    }

    static std::uint32_t twist(std::uint32_t here, std::uint32_t next) {
        const std::uint32_t mixed = (here & 0x80000000u) | (next & 0x7fffffffu);
        return (mixed >> 1) ^ ((0u - (next & 1u)) & 0x9908b0dfu);
    }

    void refill() {
        std::uint32_t* const state = state_.data();
        for (std::size_t i = 0; i < kState - kShift; ++i)
            state[i] = state[i + kShift] ^ twist(state[i], state[i + 1]);
        for (std::size_t i = kState - kShift; i < kState - 1; ++i)
            state[i] = state[i + kShift - kState] ^ twist(state[i], state[i + 1]);
        state[kState - 1] = state[kShift - 1] ^ twist(state[kState - 1], state[0]);
        for (std::size_t i = 0; i < kState; ++i) {
            std::uint32_t y = state[i];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            outputs_[i] = y ^ (y >> 18);
        }
        position_ = 0;
    }

    std::array<std::uint32_t, kState> state_;
    std::array<std::uint32_t, kState> outputs_;
    std::size_t position_ = kState;  // numpy too makes the first block only when it is asked for
};

// the largest bound drawn from 32-bit outputs
constexpr std::uint64_t kNarrow = 0xffffffffu;
constexpr std::uint64_t kTick = std::uint64_t{1} << 22;  // elements between two calls of tick

// The steps i = highest .. highest - steps + 1 of the shuffle, highest - steps >= 0. tick(elements
// since the last call).
template <typename Draw, typename Value, typename Tick>
void shuffle_steps(Value* values, std::uint64_t highest, std::uint64_t steps, Mt19937& generator,
                   Tick& tick) {
    // prefetched lines take half of a first-level cache of 32 KiB
    constexpr std::size_t kBatch = 256;
    std::array<Draw, kBatch> buffers[2];
    Draw *now = buffers[0].data(), *next = buffers[1].data();
    std::size_t count = static_cast<std::size_t>(std::min<std::uint64_t>(kBatch, steps));
    generator.draw(highest, count, now);
    std::uint64_t since = 0;
    while (count > 0) {
        steps -= count;
        const std::size_t following =
            static_cast<std::size_t>(std::min<std::uint64_t>(kBatch, steps));
        generator.draw(highest - count, following, next);
        std::size_t k = 0;
        for (; k < following; ++k) {
            __builtin_prefetch(values + next[k], 1);
            std::swap(values[highest - k], values[now[k]]);
        }
        for (; k < count; ++k)
            std::swap(values[highest - k], values[now[k]]);
        highest -= count;
        since += count;
        if (since >= kTick) {
            tick(since);
            since = 0;
        }
        std::swap(now, next);
        count = following;
    }
    tick(since);
}

// RandomState.shuffle of n values in place. `narrow` is kNarrow but in tests, which reach the
// 64-bit draws with small arrays.
template <typename Value, typename Tick>
void shuffle(Value* values, std::uint64_t n, Mt19937& generator, Tick& tick,
             std::uint64_t narrow = kNarrow) {
    if (n < 2)
        return;
    std::uint64_t highest = n - 1;
    if (highest > narrow) {
        shuffle_steps<std::uint64_t>(values, highest, highest - narrow, generator, tick);
        highest = narrow;
    }
    if (highest > 0)
        shuffle_steps<std::uint32_t>(values, highest, highest, generator, tick);
}

}  // namespace trainkit

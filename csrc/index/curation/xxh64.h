// XXH64 with seed 0, as its specification says (Cyan4973/xxHash, doc/xxhash_spec.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace trainkit {

namespace xxh64_detail {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5u;

template <typename T>
inline T load(const char* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline std::uint64_t rotate(std::uint64_t value, int bits) {
    return (value << bits) | (value >> (64 - bits));
}

inline std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
    return rotate(lane + input * kPrime2, 31) * kPrime1;
}

inline std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
    return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace xxh64_detail

inline std::uint64_t xxh64(const char* at, std::size_t size) {
    using namespace xxh64_detail;
    const char* const end = at + size;
    std::uint64_t hash = kPrime5;
    if (size >= 32) {
        std::uint64_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
        for (; end - at >= 32; at += 32) {
            for (int lane = 0; lane < 4; ++lane)
                lanes[lane] = round(lanes[lane], load<std::uint64_t>(at + 8 * lane));
        }
        hash =
            rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
        for (const std::uint64_t lane : lanes)
            hash = merge(hash, lane);
    }
    hash += size;
    for (; end - at >= 8; at += 8)
        hash = rotate(hash ^ round(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
    if (end - at >= 4) {
        hash = rotate(hash ^ (load<std::uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
        at += 4;
    }
    for (; at < end; ++at)
        hash = rotate(hash ^ (static_cast<std::uint8_t>(*at) * kPrime5), 11) * kPrime1;
    hash = (hash ^ (hash >> 33)) * kPrime2;
    hash = (hash ^ (hash >> 29)) * kPrime3;
    return hash ^ (hash >> 32);
}

}  // namespace trainkit

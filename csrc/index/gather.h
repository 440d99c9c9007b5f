// Pieces of one stretch of memory put one behind another: how documents are brought into another
// order, and get an id that ends each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace trainkit {

// True if every piece lies inside `source` and together they have exactly `out_bytes`.
inline bool pieces_fit(std::int64_t source_bytes, const std::int64_t* starts,
                       const std::int64_t* lengths, std::size_t n, std::int64_t out_bytes) {
    std::int64_t rest = out_bytes;
    for (std::size_t i = 0; i < n; ++i) {
        if (lengths[i] < 0 || lengths[i] > rest || starts[i] < 0 || starts[i] > source_bytes ||
            lengths[i] > source_bytes - starts[i])
            return false;
        rest -= lengths[i];
    }
    return rest == 0;
}

// out = source[starts[0], starts[0] + lengths[0]) ++ source[starts[1], ..) ++ ..
inline void gather(const std::uint8_t* source, const std::int64_t* starts,
                   const std::int64_t* lengths, std::size_t n, std::uint8_t* out) {
    for (std::size_t i = 0; i < n; ++i) {
        if (lengths[i] == 0)
            continue;
        std::memcpy(out, source + starts[i], static_cast<std::size_t>(lengths[i]));
        out += lengths[i];
    }
}

// out = ids[0, stops[0]) ++ value ++ ids[stops[0], stops[1]) ++ value ++ .. ++ the rest, [n +
// stops_n]. False, and out half written, unless stops rise within n.
template <typename To>
bool interleave(const std::uint32_t* ids, std::int64_t n, const std::int64_t* stops,
                std::size_t stops_n, To value, To* out) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < stops_n; ++i) {
        if (stops[i] < at || stops[i] > n)
            return false;
        for (; at < stops[i]; ++at)
            *out++ = static_cast<To>(ids[at]);
        *out++ = value;
    }
    for (; at < n; ++at)
        *out++ = static_cast<To>(ids[at]);
    return true;
}

}  // namespace trainkit

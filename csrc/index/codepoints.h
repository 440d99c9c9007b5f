// A set of code points, and whether a text holds one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace trainkit {

class CodePoints {
  public:
    static constexpr std::uint32_t kEnd = 0x110000;

    // Inclusive ranges within 0x80..0x10ffff; the caller checks them. ASCII is skipped eight bytes
    // at a time, so it cannot be in the set.
    explicit CodePoints(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& ranges)
        : bits_(kEnd / 64, 0) {
        for (const auto& [first, last] : ranges) {
            for (std::uint32_t point = first; point <= last; ++point) {
                bits_[point / 64] |= std::uint64_t{1} << (point % 64);
                leads_[lead(point)] = true;
            }
        }
    }

    // Whether a text in UTF-8 holds one. Of what is no UTF-8 nothing is known, but nothing beyond
    // its end is read.
    bool in(const std::uint8_t* text, std::size_t size) const {
        const std::uint8_t* const end = text + size;
        while (text < end) {
            while (end - text >= 8) {
                std::uint64_t word;
                std::memcpy(&word, text, 8);
                if ((word & 0x8080808080808080u) != 0)
                    break;
                text += 8;
            }
            if (text == end)
                break;
            const std::uint8_t first = *text;
            const std::ptrdiff_t length = first < 0x80   ? 1
                                          : first < 0xe0 ? 2
                                          : first < 0xf0 ? 3
                                                         : 4;
            if (leads_[first] && end - text >= length && has(text, length))
                return true;
            text += length;
        }
        return false;
    }

  private:
    static std::size_t lead(std::uint32_t point) {
        return point < 0x800     ? 0xc0 | point >> 6
               : point < 0x10000 ? 0xe0 | point >> 12
                                 : 0xf0 | point >> 18;
    }

    bool has(const std::uint8_t* text, std::ptrdiff_t length) const {
        std::uint32_t point = text[0] & (length == 2 ? 0x1fu : length == 3 ? 0x0fu : 0x07u);
        for (std::ptrdiff_t i = 1; i < length; ++i)
            point = point << 6 | (text[i] & 0x3fu);
        return point < kEnd && (bits_[point / 64] >> (point % 64) & 1) != 0;
    }

    std::vector<std::uint64_t> bits_;
    bool leads_[256] = {};
};

}  // namespace trainkit

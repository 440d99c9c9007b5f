// Pieces of ASCII as spaCy's English rules split them (spacy/tokenizer.pyx, lang/punctuation.py,
// lang/en/punctuation.py of spaCy 3.8), so that it need not be asked. Whatever could be an
// exception, an address or a smiley is left to spaCy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "xxh64.h"

namespace trainkit {

class EnglishRules {
  public:
    // Fills `sizes` with those of the piece's words; false: spaCy has to be asked.
    static bool split(std::string_view piece, const std::unordered_set<std::uint64_t>& exceptions,
                      std::vector<std::uint32_t>& sizes) {
        if (piece.size() > kLongest ||
            !std::all_of(piece.begin(), piece.end(), [](char c) { return c > ' ' && c < 0x7F; }))
            return false;
        const auto special = [&](std::string_view text) {
            return exceptions.count(xxh64(text.data(), text.size())) != 0;
        };
        std::vector<std::uint32_t> suffixes;
        std::string_view core = piece;
        std::size_t before = 0;
        sizes.clear();
        while (!core.empty() && core.size() != before) {
            before = core.size();
            const std::size_t front = prefix(core);
            const std::size_t back = suffix(core.substr(front));
            if (special(core) || special(core.substr(front)) ||
                special(core.substr(0, core.size() - back)))
                return false;
            if (front != 0)
                sizes.push_back(static_cast<std::uint32_t>(front));
            core.remove_prefix(front);
            if (back != 0 && (front == 0 || back <= core.size())) {
                suffixes.push_back(static_cast<std::uint32_t>(back));
                core.remove_suffix(back);
            }
        }
        if (special(core))
            return false;
        if (is_host(core))
            sizes.push_back(static_cast<std::uint32_t>(core.size()));
        else if (perhaps_address(core))
            return false;
        else
            split_infixes(core, sizes);
        sizes.insert(sizes.end(), suffixes.rbegin(), suffixes.rend());
        return !holds_special(piece, sizes, special);
    }

  private:
    static constexpr std::size_t kLongest = 128;
    static constexpr std::size_t kLongestSpecial = 16;

    static bool digit(char c) { return c >= '0' && c <= '9'; }
    static bool lower(char c) { return c >= 'a' && c <= 'z'; }
    static bool upper(char c) { return c >= 'A' && c <= 'Z'; }
    static bool alpha(char c) { return lower(c) || upper(c); }
    static bool one_of(char c, std::string_view set) { return set.find(c) != set.npos; }
    static bool punctuation(char c) { return one_of(c, ",:;!?()[]{}<>_#*&"); }
    static bool quote(char c) { return one_of(c, "'\"`,"); }

    static std::size_t dots(std::string_view text) {
        const std::size_t end = std::min(text.find_first_not_of('.'), text.size());
        return end >= 2 ? end : 0;
    }

    static bool starts(std::string_view text, std::string_view with) {
        return text.substr(0, with.size()) == with;
    }

    static bool ends(std::string_view text, std::string_view with) {
        return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
    }

    static std::size_t prefix(std::string_view text) {
        if (text.empty())
            return 0;
        const char c = text[0];
        if (c == '+')
            return text.size() > 1 && digit(text[1]) ? 0 : 1;
        if (punctuation(c) || quote(c) || one_of(c, "%=$"))
            return 1;
        if (c == '.')
            return dots(text);
        for (const std::string_view currency : {"US$", "C$", "A$"}) {
            if (starts(text, currency))
                return currency.size();
        }
        return 0;
    }

    // The leftmost of the matches that reach the end.
    static std::size_t suffix(std::string_view text) {
        if (text.empty())
            return 0;
        std::size_t run = 0;
        while (run < text.size() && text[text.size() - 1 - run] == '.')
            ++run;
        if (run >= 2)
            return run;
        std::size_t longest = ends(text, "'s") || ends(text, "'S") ? 2 : 0;
        for (const std::string_view unit : kUnits) {
            if (unit.size() > longest && text.size() > unit.size() && ends(text, unit) &&
                digit(text[text.size() - unit.size() - 1]))
                longest = unit.size();
        }
        if (longest != 0)
            return longest;
        const char last = text.back();
        if (punctuation(last) || quote(last))
            return 1;
        if (text.size() < 2)
            return 0;
        const char previous = text[text.size() - 2];
        if (last == '+')
            return digit(previous) ? 1 : 0;
        if (last != '.')
            return 0;
        const bool behind = digit(previous) || lower(previous) || punctuation(previous) ||
                            quote(previous) || one_of(previous, "%-+|");
        const bool capitals = text.size() > 2 && upper(previous) && upper(text[text.size() - 3]);
        return behind || capitals ? 1 : 0;
    }

    // The size of an infix at `at`; 0: none.
    static std::size_t infix(std::string_view text, std::size_t at) {
        const char c = text[at];
        if (const std::size_t run = dots(text.substr(at)); run != 0)
            return run;
        if (at == 0)
            return 0;
        const char left = text[at - 1];
        const char right = at + 1 < text.size() ? text[at + 1] : '\0';
        if (one_of(c, "+-*^") && digit(left) && (digit(right) || right == '-'))
            return 1;
        if (c == '.' && (lower(left) || quote(left)) && (upper(right) || quote(right)))
            return 1;
        if (c == ',' && alpha(left) && alpha(right))
            return 1;
        if (!alpha(left) && !digit(left))
            return 0;
        if (c == '~' || one_of(c, ":<>=/"))
            return alpha(right) ? 1 : 0;
        for (std::size_t size = 1; size <= 3 && c == '-'; ++size) {
            if (at + size < text.size() && alpha(text[at + size]))
                return size;
            if (at + size >= text.size() || text[at + size] != '-')
                break;
        }
        return 0;
    }

    static void split_infixes(std::string_view core, std::vector<std::uint32_t>& sizes) {
        std::size_t start = 0;
        for (std::size_t at = 0; at < core.size();) {
            const std::size_t size = infix(core, at);
            if (size != 0 && at != 0) {
                if (at != start)
                    sizes.push_back(static_cast<std::uint32_t>(at - start));
                sizes.push_back(static_cast<std::uint32_t>(size));
                start = at + size;
            }
            at += std::max<std::size_t>(size, 1);
        }
        if (start < core.size())
            sizes.push_back(static_cast<std::uint32_t>(core.size() - start));
    }

    // Names of letters and digits with dots between, a top-level domain last: an address, which is
    // one word.
    static bool is_host(std::string_view text) {
        const std::size_t dot = text.rfind('.');
        if (dot == text.npos || dot == 0 || text.size() - dot < 3 || text.size() > 63)
            return false;
        for (std::size_t at = 0; at < dot; ++at) {
            const bool name = alpha(text[at]) || digit(text[at]);
            if (!name && (text[at] != '.' || at == 0 || text[at - 1] == '.'))
                return false;
        }
        const std::string_view last = text.substr(dot + 1);
        return text[dot - 1] != '.' && std::all_of(last.begin(), last.end(), lower);
    }

    // A top-level domain is two small letters behind a dot at least; an IP address has three dots.
    static bool perhaps_address(std::string_view text) {
        std::size_t count = 0;
        for (std::size_t at = 0; at < text.size(); ++at) {
            if (text[at] != '.')
                continue;
            if (++count == 3 ||
                (at + 2 < text.size() && lower(text[at + 1]) && lower(text[at + 2])))
                return true;
        }
        return false;
    }

    // Whether some words make up an exception, which spaCy joins again.
    template <typename Special>
    static bool holds_special(std::string_view piece, const std::vector<std::uint32_t>& sizes,
                              Special special) {
        std::size_t start = 0;
        for (std::size_t first = 0; first < sizes.size(); ++first) {
            std::size_t size = sizes[first];
            for (std::size_t next = first + 1; next < sizes.size(); ++next) {
                size += sizes[next];
                if (size > kLongestSpecial)
                    break;
                if (special(piece.substr(start, size)))
                    return true;
            }
            start += sizes[first];
        }
        return false;
    }

    static constexpr std::string_view kUnits[] = {
        "km", "m",  "dm",  "cm",   "mm",  "ha",  "nm",  "yd", "in",   "ft",  "kg", "g",  "mg", "t",
        "lb", "oz", "m/s", "km/h", "kmh", "mph", "hPa", "Pa", "mbar", "mb",  "MB", "kb", "KB", "gb",
        "GB", "tb", "TB",  "T",    "G",   "M",   "K",   "%",  "$",    "US$", "C$", "A$"};
};

}  // namespace trainkit

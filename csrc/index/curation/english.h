// Pieces of ASCII as spaCy's English rules split them (spacy/tokenizer.pyx, lang/punctuation.py,
// lang/en/punctuation.py of spaCy 3.8), so that it need not be asked. What may be an IP
// address is left to spaCy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "xxh64.h"

namespace trainkit {

class EnglishRules {
  public:
    using Sizes = std::vector<std::uint32_t>;                     // of words, in bytes
    using Exceptions = std::unordered_map<std::uint64_t, Sizes>;  // by the text's XXH64

    // Fills `sizes` with those of the piece's words; false: spaCy has to be asked.
    static bool split(std::string_view piece, const Exceptions& exceptions, Sizes& sizes) {
        if (piece.size() > kLongest ||
            !std::all_of(piece.begin(), piece.end(), [](char c) { return c > ' ' && c < 0x7F; }))
            return false;
        Sizes suffixes;
        std::string_view core = piece;
        std::size_t before = 0;
        sizes.clear();
        while (!core.empty() && core.size() != before && !known(exceptions, core)) {
            before = core.size();
            const std::size_t front = prefix(core);
            const std::size_t back = suffix(core.substr(front));
            const bool tail = front != 0 && known(exceptions, core.substr(front));
            const bool head =
                !tail && back != 0 && known(exceptions, core.substr(0, core.size() - back));
            if (front != 0 && !head) {
                sizes.push_back(static_cast<std::uint32_t>(front));
                core.remove_prefix(front);
            }
            if (back != 0 && !tail) {
                suffixes.push_back(static_cast<std::uint32_t>(back));
                core.remove_suffix(back);
            }
        }
        if (const Sizes* const found = known(exceptions, core))
            sizes.insert(sizes.end(), found->begin(), found->end());
        else if (perhaps_ip(core))
            return false;
        else if (is_address(core))
            sizes.push_back(static_cast<std::uint32_t>(core.size()));
        else
            split_infixes(core, sizes);
        sizes.insert(sizes.end(), suffixes.rbegin(), suffixes.rend());
        return exceptions.empty() || join(piece, exceptions, sizes);
    }

  private:
    static constexpr std::size_t kLongest = 128;
    static constexpr std::size_t kLongestSpecial = 16;

    static const Sizes* known(const Exceptions& exceptions, std::string_view text) {
        const auto found = exceptions.find(xxh64(text.data(), text.size()));
        return found == exceptions.end() ? nullptr : &found->second;
    }

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

    static void split_infixes(std::string_view core, Sizes& sizes) {
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

    static bool perhaps_ip(std::string_view text) {
        std::size_t count = 0;
        for (std::size_t at = 0; at + 1 < text.size(); ++at)
            count += text[at] == '.' && digit(text[at + 1]);
        return count >= 3;
    }

    // A host, perhaps behind a protocol or a user.
    static bool is_address(std::string_view text) {
        const std::size_t name = text.find("://");
        const auto in_name = [](char c) { return alpha(c) || digit(c) || one_of(c, "_+-."); };
        if (is_host(text) || (name != text.npos && name >= 2 &&
                              std::all_of(text.begin(), text.begin() + name, in_name) &&
                              is_host(text.substr(name + 3))))
            return true;
        for (std::size_t at = text.find('@', 1); at != text.npos; at = text.find('@', at + 1)) {
            if (is_host(text.substr(at + 1)))
                return true;
        }
        return false;
    }

    // Names with dots behind, a top-level domain, perhaps a port and a path.
    static bool is_host(std::string_view text) {
        const auto inner = [](char c) { return alpha(c) || digit(c) || c == '_' || c == '-'; };
        std::size_t label = 0;  // where it starts
        std::size_t at = 0;
        for (; at < text.size() && (inner(text[at]) || text[at] == '.'); ++at) {
            if (text[at] != '.')
                continue;
            if (at == label || at - label > 64 || one_of(text[label], "_-") ||
                one_of(text[at - 1], "_-"))
                return false;
            label = at + 1;
        }
        const std::string_view top = text.substr(label, at - label);
        if (label == 0 || top.size() < 2 || top.size() > 63 ||
            !std::all_of(top.begin(), top.end(), lower))
            return false;
        if (at < text.size() && text[at] == ':') {
            const std::size_t port = at + 1;
            for (++at; at < text.size() && digit(text[at]); ++at) {
            }
            if (at - port < 2 || at - port > 5)
                return false;
        }
        return at == text.size() || one_of(text[at], "/?#");
    }

    // Joins words again that make up an exception, as they are split without it; false: two of
    // them overlap.
    static bool join(std::string_view piece, const Exceptions& exceptions, Sizes& sizes) {
        Sizes joined;
        Sizes plain;
        std::size_t free = 0;  // the first word that is in none
        std::size_t start = 0;
        for (std::size_t first = 0; first < sizes.size(); start += sizes[first++]) {
            std::size_t size = sizes[first];
            for (std::size_t end = first + 1; end < sizes.size(); ++end) {
                size += sizes[end];
                const std::string_view text = piece.substr(start, size);
                const Sizes* const found =
                    size > kLongestSpecial ? nullptr : known(exceptions, text);
                if (found == nullptr)
                    continue;
                if (!split(text, {}, plain) ||
                    !std::equal(plain.begin(), plain.end(), sizes.begin() + first,
                                sizes.begin() + end + 1))
                    continue;
                if (first < free)
                    return false;
                joined.insert(joined.end(), found->begin(), found->end());
                free = end + 1;
            }
            if (first >= free)
                joined.push_back(sizes[first]);
        }
        sizes.swap(joined);
        return true;
    }

    static constexpr std::string_view kUnits[] = {
        "km", "m",  "dm",  "cm",   "mm",  "ha",  "nm",  "yd", "in",   "ft",  "kg", "g",  "mg", "t",
        "lb", "oz", "m/s", "km/h", "kmh", "mph", "hPa", "Pa", "mbar", "mb",  "MB", "kb", "KB", "gb",
        "GB", "tb", "TB",  "T",    "G",   "M",   "K",   "%",  "$",    "US$", "C$", "A$"};
};

}  // namespace trainkit

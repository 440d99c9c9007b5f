// What the rules of curation ask of a code point. The classes are Python's own (str.isspace and the
// like), given as flags for each code point, so that C++ and Python never disagree.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trainkit {

// In the order of trainkit/data/curate/characters.py.
enum CharacterFlag : std::uint16_t {
    kSpace = 1,          // str.isspace
    kAlpha = 2,          // str.isalpha
    kLineBreak = 4,      // of str.splitlines
    kDecimal = 8,        // Unicode's Nd
    kPunctuation = 16,   // Unicode's P*
    kBlank = 32,         // simplify() writes it as a space
    kSymbol = 64,        // a word of these alone is none for Gopher's rules
    kTerminal = 128,     // ends a line
    kSentenceEnd = 256,  // ends a sentence
};

inline std::size_t count_points(std::string_view text) {
    std::size_t count = 0;
    for (const char byte : text)
        count += (byte & 0xC0) != 0x80;
    return count;
}

// The code point at `at`, which is moved behind it. The text is valid UTF-8.
inline std::uint32_t next_point(std::string_view text, std::size_t& at) {
    const auto byte = [&](std::size_t i) {
        return static_cast<std::uint32_t>(static_cast<std::uint8_t>(text[i]));
    };
    const std::uint32_t lead = byte(at);
    if (lead < 0x80) {
        at += 1;
        return lead;
    }
    if (lead < 0xE0) {
        at += 2;
        return (lead & 0x1F) << 6 | (byte(at - 1) & 0x3F);
    }
    if (lead < 0xF0) {
        at += 3;
        return (lead & 0x0F) << 12 | (byte(at - 2) & 0x3F) << 6 | (byte(at - 1) & 0x3F);
    }
    at += 4;
    return (lead & 0x07) << 18 | (byte(at - 3) & 0x3F) << 12 | (byte(at - 2) & 0x3F) << 6 |
           (byte(at - 1) & 0x3F);
}

class Characters {
  public:
    static constexpr std::size_t kPoints = 0x110000;
    static constexpr std::size_t kLongestFold = 3;  // times the character's bytes
    static constexpr std::size_t kBlock = 256;      // bytes that are looked through at once
    using Folds = std::vector<std::pair<std::uint32_t, std::string>>;

    // `flags`: of kPoints code points. `folds`: those that simplify() writes as something else,
    // none of ASCII. The caller checks both.
    Characters(std::vector<std::uint16_t> flags, const Folds& folds) : flags_(std::move(flags)) {
        for (const auto& [point, text] : folds)
            folds_.emplace(point, text);
        for (int byte = 0; byte < 0x80; ++byte) {
            if (is(byte, kSpace | kBlank))
                simple_[byte] = ' ';
            else if (!is(byte, kDecimal))
                simple_[byte] = static_cast<char>(byte);
        }
    }

    bool is(std::uint32_t point, int flag) const { return (flags_[point] & flag) != 0; }

    bool last_is(std::string_view text, int flag) const {
        if (text.empty())
            return false;
        std::size_t at = last_start(text);
        return is(next_point(text, at), flag);
    }

    bool all(std::string_view text, int flag) const {
        for (std::size_t at = 0; at < text.size();) {
            if (!is(next_point(text, at), flag))
                return false;
        }
        return true;
    }

    bool any(std::string_view text, int flag) const {
        for (std::size_t at = 0; at < text.size();) {
            if (is(next_point(text, at), flag))
                return true;
        }
        return false;
    }

    // str.lstrip, str.rstrip
    std::string_view strip_left(std::string_view text) const {
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t start = at;
            if (!is(next_point(text, at), kSpace))
                return text.substr(start);
        }
        return {};
    }

    std::string_view strip_right(std::string_view text) const {
        while (!text.empty() && last_is(text, kSpace))
            text = text.substr(0, last_start(text));
        return text;
    }

    std::string_view strip(std::string_view text) const { return strip_right(strip_left(text)); }

    // str.splitlines
    std::vector<std::string_view> split_lines(std::string_view text) const {
        std::vector<std::string_view> lines;
        std::size_t start = 0;
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t here = at;
            const std::uint32_t point = next_point(text, at);
            if (!is(point, kLineBreak))
                continue;
            lines.push_back(text.substr(start, here - start));
            if (point == '\r' && at < text.size() && text[at] == '\n')
                ++at;
            start = at;
        }
        if (start < text.size())
            lines.push_back(text.substr(start));
        return lines;
    }

    // What stands between runs of white space, with how many bytes of it are no letters of ASCII,
    // and where each run begins and ends.
    template <typename OnWord, typename OnSpace>
    void walk(std::string_view text, OnWord on_word, OnSpace on_space) const {
        struct End {
            std::size_t at, others;
        };
        std::array<End, kBlock> ends;
        End start = {0, 0};
        bool in_space = false;
        const auto finish = [&](const End& end) {
            if (end.at != start.at && in_space)
                on_space(start.at, end.at - start.at);
            else if (end.at != start.at)
                on_word(start.at, end.at - start.at, end.others - start.others);
            start = end;
            in_space = !in_space;
        };
        End here = {0, 0};
        while (here.at < text.size()) {
            const std::size_t stop = std::min(text.size(), here.at + kBlock);
            std::size_t count = 0;
            for (bool space = in_space; here.at < stop;) {  // no branch: words are short
                ends[count] = here;
                const std::uint32_t point = next_point(text, here.at);
                const bool now = is(point, kSpace);
                count += now != space;
                space = now;
                here.others += (point | 0x20) - 'a' > 'z' - 'a';
            }
            std::for_each(ends.begin(), ends.begin() + count, finish);
        }
        finish(here);
    }

    // datatrove's simplify_text of a text in lower case: numbers become "0" where `numbers`,
    // punctuation a space, runs of white space one space, marks go. Where `lines` is given, it gets
    // the number of line feeds before each word.
    std::string simplify(std::string_view text, bool numbers,
                         std::vector<std::uint32_t>* lines = nullptr) const {
        std::string out(kLongestFold * text.size(), '\0');
        char* end = out.data();
        bool space = true;  // nothing is written, or a space
        std::uint32_t line = 0;
        const auto write = [&](std::string_view raw) {
            if (space && lines)
                lines->push_back(line);
            space = false;
            std::memcpy(end, raw.data(), raw.size());
            end += raw.size();
        };
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t here = at;
            if (const char simple = simple_[static_cast<std::uint8_t>(text[at])]; simple != 0) {
                const bool blank = simple == ' ';  // no branch: words are short
                if (lines && space && !blank)
                    lines->push_back(line);
                line += text[at++] == '\n';
                *end = simple;
                end += !(blank && space);
                space = blank;
                continue;
            }
            const std::uint32_t point = next_point(text, at);
            if (numbers && is(point, kDecimal)) {
                at = number_end(text, at);
                write("0");
            } else if (is(point, kSpace | kBlank)) {
                if (!space)
                    *end++ = ' ';
                space = true;
            } else {
                const auto fold = folds_.find(point);
                if (fold == folds_.end())
                    write(text.substr(here, at - here));
                else if (!fold->second.empty())
                    write(fold->second);
            }
        }
        if (space && end != out.data())
            --end;
        out.resize(static_cast<std::size_t>(end - out.data()));
        return out;
    }

  private:
    static std::size_t last_start(std::string_view text) {
        std::size_t at = text.size() - 1;
        while (at > 0 && (text[at] & 0xC0) == 0x80)
            --at;
        return at;
    }

    // The end of \p{Nd}+([.,،٫⎖⎗⎘]\p{Nd}+)? of which the first digit ends at `at`.
    std::size_t number_end(std::string_view text, std::size_t at) const {
        at = digits_end(text, at);
        if (at == text.size())
            return at;
        std::size_t behind = at;
        const std::uint32_t point = next_point(text, behind);
        const bool separator = point == '.' || point == ',' || point == 0x60C || point == 0x66B ||
                               (point >= 0x2396 && point <= 0x2398);
        if (!separator)
            return at;
        const std::size_t end = digits_end(text, behind);
        return end > behind ? end : at;
    }

    std::size_t digits_end(std::string_view text, std::size_t at) const {
        while (at < text.size()) {
            std::size_t behind = at;
            if (!is(next_point(text, behind), kDecimal))
                break;
            at = behind;
        }
        return at;
    }

    std::vector<std::uint16_t> flags_;
    std::array<char, 256> simple_{};  // what simplify() writes for a byte; 0: look at it
    std::unordered_map<std::uint32_t, std::string> folds_;
};

}  // namespace trainkit

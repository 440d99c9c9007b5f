// The rules of C4 (Raffel et al. 2020, JMLR 21) and FineWeb (Penedo et al. 2024, arXiv:2406.17557)
// with the reasons, the order and the counting of datatrove 0.10. A limit of 0 is not asked.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "characters.h"
#include "finding.h"
#include "repeats.h"
#include "words.h"

namespace trainkit {

struct FinewebQuality {
    double min_terminal_lines;       // share of lines that end like a sentence
    double max_short_lines;          // share of lines
    std::size_t short_line;          // code points
    double max_repeated_characters;  // share of those of repeated lines
    double max_feeds_per_word;

    Verdict operator()(const Characters& characters, std::string_view text,
                       const std::vector<Word>& words) const {
        Verdict verdict;
        std::vector<std::string_view> lines = split_at_feeds(text, 1);
        lines.erase(std::remove_if(
                        lines.begin(), lines.end(),
                        [&](std::string_view line) { return characters.strip_left(line).empty(); }),
                    lines.end());
        if (lines.empty())
            return Finding{"empty", 0, 0};
        std::size_t ends = 0;
        std::size_t shorts = 0;
        for (const std::string_view line : lines) {
            ends += characters.last_is(line, kTerminal);
            shorts += count_points(line) <= short_line;
        }
        const auto all = static_cast<double>(lines.size());
        const auto feeds = static_cast<double>(std::count(text.begin(), text.end(), '\n'));
        HashCounts counts;
        const double repeated = static_cast<double>(repeats(lines, counts).points) /
                                (static_cast<double>(count_points(text)) - feeds);
        below(verdict, "line_punct_ratio", static_cast<double>(ends) / all, min_terminal_lines) ||
            above(verdict, "short_line_ratio", static_cast<double>(shorts) / all,
                  max_short_lines) ||
            above(verdict, "char_dup_ratio", repeated, max_repeated_characters) ||
            above(verdict, "list_ratio", feeds / static_cast<double>(words.size()),
                  max_feeds_per_word);
        return verdict;
    }
};

struct C4Quality {
    bool terminal_punctuation;  // lines that do not end like a sentence are dropped
    double min_sentences;
    std::size_t min_words;  // of a line
    std::size_t max_word;   // code points
    bool lorem_ipsum, javascript, curly_bracket, policy, citations;

    // `kept` gets the text that is left where the verdict lets it through. `words_of`: makes the
    // pieces of a line known.
    template <typename WordsOf>
    Verdict operator()(const Characters& characters, std::string_view text, WordsOf sentences_of,
                       std::string& kept) const {
        kept.clear();
        std::size_t sentences = 0;
        bool first = true;
        for (std::string_view line : characters.split_lines(text)) {
            line = characters.strip(line);
            std::size_t words = 0;
            bool long_word = false;
            characters.walk(
                line,
                [&](std::size_t start, std::size_t size, std::size_t) {
                    words += 1;
                    long_word |= max_word != 0 && size > max_word &&
                                 count_points(line.substr(start, size)) > max_word;
                },
                [](std::size_t, std::size_t) {});
            if (long_word)
                continue;
            const std::string cited =
                citations ? without_citations(characters, line) : std::string(line);
            if ((terminal_punctuation && !ends_sentence(cited)) || words < min_words)
                continue;
            std::string lower = cited;
            for (char& byte : lower)
                byte = byte >= 'A' && byte <= 'Z' ? static_cast<char>(byte + 32) : byte;
            const auto holds = [&](const char* phrase) {
                return lower.find(phrase) != std::string::npos;
            };
            if (lorem_ipsum && holds("lorem ipsum"))
                return Finding{"lorem_ipsum", 1, 0};
            if (javascript && holds("javascript"))
                continue;
            if (curly_bracket && cited.find('{') != std::string::npos)
                return Finding{"curly_bracket", 1, 0};
            if (policy && std::any_of(std::begin(kPolicy), std::end(kPolicy), holds))
                continue;
            if (min_sentences != 0)
                sentences += sentences_of(cited);
            if (!first)
                kept += '\n';
            first = false;
            kept += cited;
        }
        Verdict verdict;
        if (!below(verdict, "too_few_sentences", static_cast<double>(sentences), min_sentences))
            kept = std::string(characters.strip(kept));
        return verdict;
    }

  private:
    static constexpr const char* kPolicy[] = {"terms of use", "privacy policy", "cookie policy",
                                              "uses cookies", "use of cookies", "use cookies"};

    static bool ends_sentence(std::string_view line) {
        if (line.empty())
            return false;
        const char last = line.back();
        const bool ellipsis = line.size() >= 3 && line.substr(line.size() - 3) == "...";
        return !ellipsis &&
               (last == '.' || last == '?' || last == '!' || last == '"' || last == '\'');
    }

    // re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", line)
    static std::string without_citations(const Characters& characters, std::string_view line) {
        std::string out;
        for (std::size_t at = 0; at < line.size();) {
            if (line[at] == '[') {
                std::size_t end = at + 1;
                while (end < line.size()) {
                    std::size_t behind = end;
                    if (!characters.is(next_point(line, behind), kDecimal))
                        break;
                    end = behind;
                }
                if (end < line.size() && line[end] == ']') {
                    at = end + 1;
                    continue;
                }
                bool marked = false;
                for (const std::string_view mark : {"[edit]", "[citation needed]"}) {
                    if (line.substr(at, mark.size()) == mark) {
                        at += mark.size();
                        marked = true;
                        break;
                    }
                }
                if (marked)
                    continue;
            }
            out += line[at++];
        }
        return out;
    }
};

// Sentences of a line as spaCy's sentencizer counts them: a word that is no punctuation, behind one
// that ends a sentence, begins the next. Returns pieces that are not known, as `each_word`.
inline std::vector<std::string_view> count_sentences(const Characters& characters,
                                                     PieceMemory& memory, std::string_view line,
                                                     std::size_t& count) {
    count = 1;
    bool ended = false;
    return each_word(
        characters, memory, line,
        [&](std::string_view word, std::size_t, bool) {
            std::size_t at = 0;
            const bool end = characters.is(next_point(word, at), kSentenceEnd) && at == word.size();
            if (ended && !end && !characters.all(word, kPunctuation)) {
                ++count;
                ended = false;
            } else if (end) {
                ended = true;
            }
        },
        [&] {
            count += ended;
            ended = false;
        });
}

}  // namespace trainkit

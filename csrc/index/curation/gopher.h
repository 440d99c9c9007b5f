// The rules of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A1) with the reasons, the order
// and the counting of datatrove 0.10. A limit of 0 is not asked.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "characters.h"
#include "finding.h"
#include "repeats.h"
#include "words.h"

namespace trainkit {

struct GopherQuality {
    double min_words, max_words;
    double min_average_length, max_average_length;  // of a word, in code points
    double max_symbol_ratio;                        // "#" or "..." to words
    double max_bullet_lines, max_ellipsis_lines;    // shares of lines
    double min_alphabetic_words;                    // share of words
    double min_stop_words;                          // different ones
    std::unordered_set<std::string> stop_words;

    Verdict operator()(const Characters& characters, std::string_view text,
                       const std::vector<Word>& words) const {
        Verdict verdict;
        std::size_t count = 0;
        std::size_t points = 0;
        std::size_t alphabetic = 0;
        std::unordered_set<std::string_view> stops;
        for (const Word& word : words) {
            const std::string_view letters = text.substr(word.start, word.size);
            if (!characters.all(letters, kSymbol)) {
                count += 1;
                points += word.points;
            }
            alphabetic += characters.any(letters, kAlpha);
            if (word.size <= kLongestStop && stop_words.count(std::string(letters)) != 0)
                stops.insert(letters);
        }
        const auto all = static_cast<double>(words.size());
        const auto number = static_cast<double>(count);
        if (below(verdict, "gopher_short_doc", number, min_words) ||
            above(verdict, "gopher_long_doc", number, max_words) || words.empty())
            return verdict;
        const double average = count ? static_cast<double>(points) / number : 0;
        const double hashes = occurrences(text, "#") / all;
        const double ellipses = (occurrences(text, "...") + occurrences(text, "…")) / all;
        if (below(verdict, "gopher_below_avg_threshold", average, min_average_length) ||
            above(verdict, "gopher_above_avg_threshold", average, max_average_length) ||
            above(verdict, "gopher_too_many_hashes", hashes, max_symbol_ratio) ||
            above(verdict, "gopher_too_many_ellipsis", ellipses, max_symbol_ratio))
            return verdict;
        const auto [bullets, ends] = line_shares(characters, text);
        if (above(verdict, "gopher_too_many_bullets", bullets, max_bullet_lines) ||
            above(verdict, "gopher_too_many_end_ellipsis", ends, max_ellipsis_lines))
            return verdict;
        below(verdict, "gopher_below_alpha_threshold", static_cast<double>(alphabetic) / all,
              min_alphabetic_words) ||
            below(verdict, "gopher_enough_stop_words", static_cast<double>(stops.size()),
                  min_stop_words);
        return verdict;
    }

  private:
    static constexpr std::size_t kLongestStop = 64;

    static double occurrences(std::string_view text, std::string_view of) {
        std::size_t count = 0;
        for (std::size_t at = text.find(of); at != text.npos; at = text.find(of, at + of.size()))
            ++count;
        return static_cast<double>(count);
    }

    static bool ends_with(std::string_view text, std::string_view end) {
        return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
    }

    // Shares of lines that begin with a bullet, and that end with an ellipsis.
    static std::pair<double, double> line_shares(const Characters& characters,
                                                 std::string_view text) {
        std::size_t bullets = 0;
        std::size_t ends = 0;
        const std::vector<std::string_view> lines = characters.split_lines(text);
        for (const std::string_view line : lines) {
            const std::string_view start = characters.strip_left(line);
            bullets += start.substr(0, 1) == "-" || start.substr(0, 3) == "•";
            const std::string_view end = characters.strip_right(line);
            ends += ends_with(end, "...") || ends_with(end, "…");
        }
        const double all = lines.empty() ? 1 : static_cast<double>(lines.size());
        return {static_cast<double>(bullets) / all, static_cast<double>(ends) / all};
    }
};

struct GopherRepetition {
    using Limits = std::vector<std::pair<std::size_t, double>>;  // of n-grams

    double max_lines, max_paragraphs;                      // shares of them
    double max_line_characters, max_paragraph_characters;  // shares of code points
    Limits top_grams, repeated_grams;                      // shares of code points

    Verdict operator()(const Characters& characters, std::string_view text,
                       const std::vector<Word>& words) const {
        Verdict verdict;
        const auto all = static_cast<double>(count_points(text));
        HashCounts counts;
        const auto parts = [&](const std::vector<std::string_view>& elements, double share,
                               double characters_share, const char* names[2]) {
            const Repeats found = repeats(elements, counts);
            return above(verdict, names[0],
                         static_cast<double>(found.elements) / static_cast<double>(elements.size()),
                         share) ||
                   above(verdict, names[1], static_cast<double>(found.points) / all,
                         characters_share);
        };
        const char* paragraphs[] = {"dup_para_frac", "dup_para_char_frac"};
        const char* lines[] = {"dup_line_frac", "dup_line_char_frac"};
        if (text.empty() ||
            parts(split_at_feeds(characters.strip(text), 2), max_paragraphs,
                  max_paragraph_characters, paragraphs) ||
            parts(split_at_feeds(text, 1), max_lines, max_line_characters, lines))
            return verdict;
        Grams spaced(text, words, true);
        for (const auto& [n, limit] : top_grams) {
            const std::size_t points = top_gram_points(spaced, n, counts);
            if (above(verdict, "top_n_gram", static_cast<double>(points) / all, limit)) {
                verdict->reason = "top_" + std::to_string(n) + "_gram";
                return verdict;
            }
        }
        Grams joined(text, words, false);
        for (const auto& [n, limit] : repeated_grams) {
            const std::size_t points = repeated_gram_points(joined, n, counts);
            if (above(verdict, "duplicated_n_grams", static_cast<double>(points) / all, limit)) {
                verdict->reason = "duplicated_" + std::to_string(n) + "_n_grams";
                return verdict;
            }
        }
        return verdict;
    }
};

}  // namespace trainkit

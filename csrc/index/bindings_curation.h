// Python's face of curation/: texts are str, their words remembered from rule to rule.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "curation/benchmark_index.h"
#include "curation/characters.h"
#include "curation/fasttext.h"
#include "curation/finding.h"
#include "curation/gopher.h"
#include "curation/minhash.h"
#include "curation/union_find.h"
#include "curation/web_rules.h"
#include "curation/words.h"

namespace py = pybind11;

namespace {

// The text of a str in UTF-8, which lives as long as the str. UnicodeEncodeError: a lone surrogate.
std::string_view utf8(const py::handle& text) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr)
        throw py::error_already_set();
    if (size > 0xFFFFFFFF)
        throw py::value_error("a text must be shorter than 4 GiB");
    return {data, static_cast<std::size_t>(size)};
}

class TextWords {
  public:
    TextWords(const py::array_t<std::uint16_t, py::array::c_style>& flags,
              const trainkit::Characters::Folds& folds, const std::vector<std::string>& exceptions,
              py::function split, bool english)
        : characters_(checked(flags), checked(folds)), memory_(english), split_(std::move(split)) {
        ask({exceptions.begin(), exceptions.end()},
            [&](std::string_view piece, const auto& sizes) { memory_.except(piece, sizes); });
    }

    const trainkit::Characters& characters() const { return characters_; }

    // The text's words; those of the last str that was asked for are kept.
    const std::vector<trainkit::Word>& of(const py::str& text) {
        if (!last_.is(text)) {
            last_ = py::none();
            split(utf8(text), words_);
            last_ = text;
        }
        return words_;
    }

    std::vector<trainkit::Word> of_view(std::string_view text) {
        std::vector<trainkit::Word> words;
        split(text, words);
        return words;
    }

    std::size_t sentences(std::string_view line) {
        std::size_t count = 0;
        while (learn(trainkit::count_sentences(characters_, memory_, line, count))) {
        }
        return count;
    }

  private:
    static std::vector<std::uint16_t> checked(
        const py::array_t<std::uint16_t, py::array::c_style>& flags) {
        if (flags.size() != static_cast<py::ssize_t>(trainkit::Characters::kPoints))
            throw py::value_error("flags must have one entry for each of 0x110000 code points");
        return {flags.data(), flags.data() + flags.size()};
    }

    void split(std::string_view text, std::vector<trainkit::Word>& words) {
        memory_.bound();
        while (learn(trainkit::split_words(characters_, memory_, text, words))) {
        }
    }

    static const trainkit::Characters::Folds& checked(const trainkit::Characters::Folds& folds) {
        for (const auto& [point, text] : folds) {
            const std::size_t size = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
            if (point < 0x80 || point >= trainkit::Characters::kPoints ||
                text.size() > trainkit::Characters::kLongestFold * size)
                throw py::value_error("a fold must be of no ASCII character, and thrice as long");
        }
        return folds;
    }

    // Whether there was something to learn: the text has to be read again.
    bool learn(const std::vector<std::string_view>& unknown) {
        ask(unknown,
            [&](std::string_view piece, const auto& sizes) { memory_.learn(piece, sizes); });
        return !unknown.empty();
    }

    template <typename Take>
    void ask(const std::vector<std::string_view>& unknown, Take take) {
        if (unknown.empty())
            return;
        py::list pieces;
        for (const std::string_view piece : unknown)
            pieces.append(py::str(piece.data(), piece.size()));
        const auto sizes = split_(pieces).cast<std::vector<std::vector<std::uint32_t>>>();
        if (sizes.size() != unknown.size())
            throw py::value_error("split must answer for every piece");
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            std::size_t sum = 0;
            for (const std::uint32_t size : sizes[i])
                sum += size;
            if (sum == 0 || sum != unknown[i].size())
                throw py::value_error("the words of a piece must make up all of it: " +
                                      std::string(unknown[i]));
            take(unknown[i], sizes[i]);
        }
    }

    trainkit::Characters characters_;
    trainkit::PieceMemory memory_;
    py::function split_;
    py::object last_ = py::none();
    std::vector<trainkit::Word> words_;
};

std::size_t checked_gram(std::size_t n) {
    if (n == 0)
        throw py::value_error("an n-gram has a word at least");
    return n;
}

py::object as_tuple(const trainkit::Verdict& verdict) {
    if (!verdict)
        return py::none();
    return py::make_tuple(verdict->reason, verdict->value, verdict->limit);
}

template <typename Rule>
py::object judge(const Rule& rule, TextWords& words, const py::str& text) {
    return as_tuple(rule(words.characters(), utf8(text), words.of(text)));
}

// (verdict, text that is left)
py::tuple judge_c4(const trainkit::C4Quality& rule, TextWords& words, const py::str& text) {
    std::string kept;
    const trainkit::Verdict verdict = rule(
        words.characters(), utf8(text),
        [&](std::string_view line) { return words.sentences(line); }, kept);
    return py::make_tuple(as_tuple(verdict), kept);
}

py::array_t<std::int64_t> sign(const trainkit::MinHash& hash, TextWords& words,
                               const py::str& lower) {
    const std::string simple = words.characters().simplify(utf8(lower), true);
    const std::vector<std::int64_t> values = hash(simple, words.of_view(simple));
    return py::array_t<std::int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

// The XXH64 of each band of `rows` values, one after another; nothing of a text without a shingle.
py::bytes band_keys(const trainkit::MinHash& hash, TextWords& words, const py::str& lower,
                    std::size_t rows) {
    const std::string simple = words.characters().simplify(utf8(lower), true);
    const std::vector<std::int64_t> values = hash(simple, words.of_view(simple));
    if (rows == 0 || values.size() % rows != 0)
        throw py::value_error("rows must divide the number of hashes");
    std::vector<std::uint64_t> keys;
    for (std::size_t at = 0; at < values.size(); at += rows)
        keys.push_back(
            trainkit::xxh64(reinterpret_cast<const char*>(values.data() + at), 8 * rows));
    return {reinterpret_cast<const char*>(keys.data()), 8 * keys.size()};
}

// Words between white space of a simplified text that keeps its numbers.
struct PlainWords {
    std::string text;
    std::vector<trainkit::Word> words;
    std::vector<std::uint32_t> lines;

    PlainWords(const TextWords& words_of, const py::str& lower) {
        const trainkit::Characters& characters = words_of.characters();
        text = characters.simplify(utf8(lower), false, &lines);
        characters.walk(
            text,
            [&](std::size_t start, std::size_t size, std::size_t) {
                words.push_back(
                    {static_cast<std::uint32_t>(start), static_cast<std::uint32_t>(size), 0});
            },
            [](std::size_t, std::size_t) {});
    }
};

std::pair<std::size_t, std::size_t> add_entry(trainkit::BenchmarkIndex& index,
                                              const TextWords& words_of, const py::str& lower,
                                              std::uint32_t entry, std::size_t least) {
    const PlainWords plain(words_of, lower);
    if (plain.words.size() < least)
        return {plain.words.size(), 0};
    return {plain.words.size(), index.add(plain.text, plain.words, entry)};
}

// [(entry, line of the text from 1, the words)]
py::list find_entries(const trainkit::BenchmarkIndex& index, const TextWords& words_of,
                      const py::str& lower) {
    const PlainWords plain(words_of, lower);
    py::list found;
    for (const auto& match : index.find(plain.text, plain.words)) {
        const trainkit::Word& first = plain.words[match.word];
        const trainkit::Word& last = plain.words[match.word + match.words - 1];
        found.append(
            py::make_tuple(match.entry, plain.lines[match.word] + 1,
                           plain.text.substr(first.start, last.start + last.size - first.start)));
    }
    return found;
}

void unite(py::array_t<std::uint32_t, py::array::c_style> parents,
           const py::array_t<std::uint64_t, py::array::c_style>& edges) {
    const auto size = static_cast<std::uint64_t>(parents.size());
    if (edges.ndim() != 2 || edges.shape(1) != 2)
        throw py::value_error("edges must be uint64 [n, 2]");
    const std::uint64_t* const pairs = edges.data();
    const auto count = static_cast<std::size_t>(edges.shape(0));
    for (std::size_t i = 0; i < 2 * count; ++i) {
        if (pairs[i] >= size)
            throw py::value_error("an edge names a node that is not there");
    }
    std::uint32_t* const nodes = parents.mutable_data();
    py::gil_scoped_release release;
    trainkit::unite(nodes, pairs, count);
}

void find_roots(py::array_t<std::uint32_t, py::array::c_style> parents) {
    std::uint32_t* const nodes = parents.mutable_data();
    const auto size = static_cast<std::size_t>(parents.size());
    py::gil_scoped_release release;
    trainkit::find_roots(nodes, size);
}

void bind_rules(py::module_& module) {
    using namespace pybind11::literals;
    using trainkit::C4Quality;
    using trainkit::FinewebQuality;
    using trainkit::GopherQuality;
    using trainkit::GopherRepetition;
    py::class_<GopherQuality>(module, "GopherQuality")
        .def(py::init([](double a, double b, double c, double d, double e, double f, double g,
                         double h, double i, const std::vector<std::string>& stops) {
                 return GopherQuality{a, b, c, d, e, f, g, h, i, {stops.begin(), stops.end()}};
             }),
             py::kw_only(), "min_words"_a, "max_words"_a, "min_average_length"_a,
             "max_average_length"_a, "max_symbol_ratio"_a, "max_bullet_lines"_a,
             "max_ellipsis_lines"_a, "min_alphabetic_words"_a, "min_stop_words"_a, "stop_words"_a)
        .def("__call__", &judge<GopherQuality>, "words"_a, "text"_a);
    py::class_<GopherRepetition>(module, "GopherRepetition")
        .def(py::init([](double a, double b, double c, double d, GopherRepetition::Limits top,
                         GopherRepetition::Limits repeated) {
                 for (const auto* limits : {&top, &repeated}) {
                     for (const auto& [n, limit] : *limits)
                         checked_gram(n);
                 }
                 return GopherRepetition{a, b, c, d, std::move(top), std::move(repeated)};
             }),
             py::kw_only(), "max_lines"_a, "max_paragraphs"_a, "max_line_characters"_a,
             "max_paragraph_characters"_a, "top_grams"_a, "repeated_grams"_a)
        .def("__call__", &judge<GopherRepetition>, "words"_a, "text"_a);
    py::class_<FinewebQuality>(module, "FinewebQuality")
        .def(py::init<double, double, std::size_t, double, double>(), py::kw_only(),
             "min_terminal_lines"_a, "max_short_lines"_a, "short_line"_a,
             "max_repeated_characters"_a, "max_feeds_per_word"_a)
        .def("__call__", &judge<FinewebQuality>, "words"_a, "text"_a);
    py::class_<C4Quality>(module, "C4Quality")
        .def(py::init<bool, double, std::size_t, std::size_t, bool, bool, bool, bool, bool>(),
             py::kw_only(), "terminal_punctuation"_a, "min_sentences"_a, "min_words"_a,
             "max_word"_a, "lorem_ipsum"_a, "javascript"_a, "curly_bracket"_a, "policy"_a,
             "citations"_a)
        .def("__call__", &judge_c4, "words"_a, "text"_a);
}

}  // namespace

inline void bind_curation(py::module_& module) {
    using namespace pybind11::literals;
    py::class_<TextWords>(module, "TextWords",
                          "Texts and their words, for the rules of curation. ValueError: flags of "
                          "another size, or `split` does not answer for every piece.")
        .def(py::init<const py::array_t<std::uint16_t, py::array::c_style>&,
                      const trainkit::Characters::Folds&, const std::vector<std::string>&,
                      py::function, bool>(),
             "flags"_a, "folds"_a, "exceptions"_a, "split"_a, "english"_a)
        .def(
            "words",
            [](TextWords& self, const py::str& text) {
                std::vector<std::string> found;
                for (const trainkit::Word& word : self.of(text))
                    found.emplace_back(utf8(text).substr(word.start, word.size));
                return found;
            },
            "text"_a)
        .def(
            "count", [](TextWords& self, const py::str& text) { return self.of(text).size(); },
            "text"_a)
        .def(
            "sentences",
            [](TextWords& self, const py::str& line) { return self.sentences(utf8(line)); },
            "line"_a)
        .def(
            "simplify",
            [](const TextWords& self, const py::str& lower, bool numbers) {
                return self.characters().simplify(utf8(lower), numbers);
            },
            "lower"_a, "numbers"_a);
    bind_rules(module);
    py::class_<trainkit::MinHash>(module, "MinHash")
        .def(
            py::init([](std::size_t n, std::vector<std::uint64_t> a, std::vector<std::uint64_t> b) {
                if (a.size() != b.size())
                    throw py::value_error("a and b must have one entry a hash");
                return trainkit::MinHash(checked_gram(n), std::move(a), std::move(b));
            }),
            "n"_a, "a"_a, "b"_a)
        .def("__call__", &sign, "words"_a, "lower"_a)
        .def("band_keys", &band_keys, "words"_a, "lower"_a, "rows"_a);
    py::class_<trainkit::BenchmarkIndex>(module, "BenchmarkIndex")
        .def(py::init([](std::size_t n) { return trainkit::BenchmarkIndex(checked_gram(n)); }),
             "n"_a)
        .def("add", &add_entry, "words"_a, "lower"_a, "entry"_a, "least"_a)
        .def("forget_common", &trainkit::BenchmarkIndex::forget_common, "most"_a)
        .def("find", &find_entries, "words"_a, "lower"_a);
    py::class_<trainkit::FastTextModel>(module, "FastTextModel")
        .def(py::init<const std::string&>(), "path"_a)
        .def_readonly("labels", &trainkit::FastTextModel::labels)
        .def(
            "best",
            [](trainkit::FastTextModel& self, const py::str& text) {
                const std::vector<float> found = self.predict(utf8(text));
                if (found.empty())
                    return std::make_pair(std::string(), 0.0f);
                const auto at = std::max_element(found.begin(), found.end()) - found.begin();
                return std::make_pair(self.labels[static_cast<std::size_t>(at)],
                                      found[static_cast<std::size_t>(at)]);
            },
            "text"_a)
        .def(
            "score",
            [](trainkit::FastTextModel& self, const py::str& text, std::size_t label) {
                const std::vector<float> found = self.predict(utf8(text));
                return found.empty() ? 0.0f : found.at(label);
            },
            "text"_a, "label"_a);
    module.def("unite", &unite, "parents"_a.noconvert(), "edges"_a);
    module.def("find_roots", &find_roots, "parents"_a.noconvert());
}

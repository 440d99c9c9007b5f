// Python's face of Megatron's sample order: checks arguments, drops the GIL, calls megatron.h and
// mt19937.h.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "megatron.h"

namespace py = pybind11;

namespace {

constexpr std::int64_t kMostDocuments = std::numeric_limits<std::int32_t>::max();
// no product overflows; memory ends long before
constexpr std::int64_t kMostEntries = std::int64_t{1} << 44;

// Called without the GIL every few million elements: lets signals through and tells Python how many
// elements are done since.
class Ticker {
  public:
    explicit Ticker(const py::object& call) : call_(call) {}
    void operator()(std::int64_t elements) {
        py::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0)
            throw py::error_already_set();
        if (!call_.is_none())
            call_(elements);
    }

  private:
    const py::object& call_;
};

void require(bool holds, const char* words) {
    if (!holds)
        throw py::value_error(words);
}

// Runs work(tick) without the GIL; a failed read or write becomes an OSError.
template <typename Work>
void without_gil(const py::object& call, const Work& work) {
    Ticker tick(call);
    try {
        py::gil_scoped_release release;
        work(tick);
    } catch (const trainkit::FileError& error) {
        if (error.code == 0)
            throw std::runtime_error("the file ends before the lengths do");
        errno = error.code;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
}

std::unique_ptr<trainkit::Documents> make_documents(int fd, std::uint64_t offset,
                                                    std::int64_t first, std::int64_t last,
                                                    std::int64_t epochs, const py::object& tick,
                                                    std::int64_t chunk) {
    require(0 <= first && first < last && last <= kMostDocuments,
            "documents must be 0 <= first < last < 2**31");
    require(epochs >= 1 && epochs <= kMostEntries / (last - first),
            "epochs must be at least 1, and epochs * documents at most 2**44");
    require(chunk >= 1, "chunk must be at least 1");
    std::unique_ptr<trainkit::Documents> documents;
    without_gil(tick, [&](Ticker& ticker) {
        documents =
            std::make_unique<trainkit::Documents>(fd, offset, first, last, epochs, ticker, chunk);
    });
    return documents;
}

void shuffle_documents(trainkit::Documents& documents, trainkit::Mt19937& generator,
                       std::int64_t begin, std::int64_t end, const py::object& tick) {
    require(0 <= begin && begin <= end && end <= documents.size(),
            "begin and end must be 0 <= begin <= end <= size");
    without_gil(tick, [&](Ticker& ticker) { documents.shuffle(begin, end, generator, ticker); });
}

void write_ids(trainkit::Documents& documents, int fd, std::uint64_t at, int threads,
               const py::object& tick) {
    without_gil(tick, [&](Ticker& ticker) { documents.write_ids(fd, at, threads, ticker); });
}

void write_samples(const trainkit::Documents& documents, int fd, std::uint64_t at,
                   std::int64_t seq_length, int extra, std::int64_t samples, bool wide, int threads,
                   const py::object& tick) {
    require(seq_length >= 1 && seq_length <= kMostDocuments, "seq_length must be in 1..2**31-1");
    require(extra == 0 || extra == 1, "extra must be 0 or 1");
    require(samples >= 0 && samples <= documents.tokens() / seq_length + kMostDocuments,
            "samples are more than the tokens give");
    without_gil(tick, [&](Ticker& ticker) {
        wide ? documents.write_samples<std::int64_t>(fd, at, seq_length, extra, samples, threads,
                                                     ticker)
             : documents.write_samples<std::int32_t>(fd, at, seq_length, extra, samples, threads,
                                                     ticker);
    });
}

void write_shuffle(trainkit::Mt19937& generator, std::int64_t separate, std::int64_t total,
                   bool wide, int fd, std::uint64_t at, const py::object& tick) {
    require(0 <= separate && separate <= total && total <= kMostEntries,
            "separate and total must be 0 <= separate <= total <= 2**44");
    require(wide || total <= std::int64_t{0xffffffff}, "total needs 64-bit numbers");
    without_gil(tick, [&](Ticker& ticker) {
        wide ? trainkit::write_shuffle<std::int64_t>(generator, separate, total, fd, at, ticker)
             : trainkit::write_shuffle<std::uint32_t>(generator, separate, total, fd, at, ticker);
    });
}

template <typename Value>
void shuffle_array(trainkit::Mt19937& generator, py::array_t<Value> values, std::uint64_t narrow) {
    require(values.ndim() == 1 && values.writeable() && (values.flags() & py::array::c_style) != 0,
            "values must be one-dimensional, contiguous and writable");
    require(narrow >= 1 && narrow <= trainkit::kNarrow, "narrow must be in 1..2**32-1");
    Value* const memory = values.mutable_data();
    const auto count = static_cast<std::uint64_t>(values.size());
    without_gil(py::none(), [&](Ticker& ticker) {
        trainkit::shuffle(memory, count, generator, ticker, narrow);
    });
}

std::vector<std::int64_t> write_blend(const std::vector<double>& weights,
                                      const std::vector<std::int64_t>& sizes, std::int64_t total,
                                      int dataset_fd, std::uint64_t dataset_at, int number_fd,
                                      std::uint64_t number_at, const py::object& tick) {
    require(!weights.empty() && weights.size() <= 32766 && weights.size() == sizes.size(),
            "weights and sizes must be of the same 1..32,766 datasets");
    std::int64_t most = 0;
    for (const std::int64_t size : sizes) {
        require(size >= 1, "sizes must be at least 1");
        most = size > kMostEntries - most ? kMostEntries : most + size;
    }
    require(0 <= total && total <= most, "total must be in 0..sum(sizes), at most 2**44");
    std::vector<std::int64_t> drawn(weights.size(), 0);
    without_gil(tick, [&](Ticker& ticker) {
        trainkit::write_blend(weights, sizes, total, dataset_fd, dataset_at, number_fd, number_at,
                              drawn.data(), ticker);
    });
    return drawn;
}

}  // namespace

inline void bind_megatron(py::module_& module) {
    py::class_<trainkit::Mt19937>(module, "MersenneTwister",
                                  "The stream of numpy's RandomState(seed).")
        .def(py::init<std::uint32_t>(), py::arg("seed"))
        .def("shuffle", &shuffle_array<std::uint32_t>, py::arg("values").noconvert(),
             py::arg("narrow") = trainkit::kNarrow,
             "RandomState.shuffle of uint32 or int64 [n] in place; draws above `narrow` take "
             "64-bit outputs (numpy: 2**32 - 1).")
        .def("shuffle", &shuffle_array<std::int64_t>, py::arg("values").noconvert(),
             py::arg("narrow") = trainkit::kNarrow);
    py::class_<trainkit::Documents>(
        module, "MegatronDocuments",
        "`epochs` copies of the document ids [first, last); int32 lengths are at byte offset + 4 * "
        "id of the file. RuntimeError: it ends early, or a "
        "length is negative. Everywhere tick(n) is called, if given, when n more elements are "
        "done; OSError: a read or write failed.")
        .def(py::init(&make_documents), py::arg("fd"), py::arg("offset"), py::arg("first"),
             py::arg("last"), py::arg("epochs"), py::arg("tick") = py::none(),
             py::arg("chunk") = trainkit::Documents::kChunk)
        .def_property_readonly("tokens", &trainkit::Documents::tokens)
        .def_property_readonly("last_length", &trainkit::Documents::last_length)
        .def("__len__", &trainkit::Documents::size)
        .def("shuffle", &shuffle_documents, py::arg("generator"), py::arg("begin"), py::arg("end"),
             py::arg("tick") = py::none(), "Shuffle the entries [begin, end).")
        .def("write_ids", &write_ids, py::arg("fd"), py::arg("at"), py::arg("threads"),
             py::arg("tick") = py::none(), "The ids, int32, from byte `at` on.")
        .def("write_samples", &write_samples, py::arg("fd"), py::arg("at"), py::arg("seq_length"),
             py::arg("extra"), py::arg("samples"), py::arg("wide"), py::arg("threads"),
             py::arg("tick") = py::none(),
             "Rows (position, offset) of samples + 1, int32 or (wide) int64, from byte `at` on; "
             "after write_ids.");
    module.def("write_shuffle_index", &write_shuffle, py::arg("generator"), py::arg("separate"),
               py::arg("total"), py::arg("wide"), py::arg("fd"), py::arg("at"),
               py::arg("tick") = py::none(),
               "[0, separate) and [separate, total), each shuffled, as uint32 or (wide) int64, "
               "from byte `at` on.");
    module.def("write_blend", &write_blend, py::arg("weights"), py::arg("sizes"), py::arg("total"),
               py::arg("dataset_fd"), py::arg("dataset_at"), py::arg("number_fd"),
               py::arg("number_at"), py::arg("tick") = py::none(),
               "Megatron's greedy blend of `total` samples: int16 datasets and int64 numbers into "
               "two files; a dataset leaves when its size is drawn. Returns what each gave.");
}

// Megatron's document, sample and shuffle index (megatron-core 0.16, core/datasets/gpt_dataset.py
// and helpers.cpp), written in a stream.
//
// Documents are shuffled as (length, id) pairs of 8 bytes, so that whoever needs the lengths in the
// new order reads memory from front to back; what has been computed goes through small buffers into
// the file. At any time one large array is in memory: 8 bytes an entry of the document index, later
// 4 bytes a sample.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "megatron_memory.h"
#include "mt19937.h"

namespace trainkit {

// Runs work(block) for every block on `threads` threads, the calling one among them, which also
// calls tick(blocks since the last call). make() gives each thread a work of its own, whose buffers
// serve all its blocks. The first exception of any of them stops all and is thrown here.
template <typename Make, typename Tick>
void over_blocks(std::int64_t blocks, int threads, const Make& make, Tick& tick) {
    std::atomic<std::int64_t> next{0}, finished{0};
    std::exception_ptr failure;
    std::mutex lock;
    const auto fail = [&] {
        const std::lock_guard<std::mutex> guard(lock);
        if (!failure)
            failure = std::current_exception();
        next = blocks;
    };
    const auto loop = [&](bool caller) {
        std::int64_t told = 0;
        try {
            auto work = make();
            for (std::int64_t block; (block = next++) < blocks; ++finished) {
                work(block);
                if (caller && block % 16 == 0) {
                    const std::int64_t all = finished;
                    tick(all - told);
                    told = all;
                }
            }
        } catch (...) {
            fail();
        }
        return told;
    };
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads && i < blocks; ++i)
            others.emplace_back(loop, false);
    } catch (...) {  // no thread more: those there are do the work
    }
    const std::int64_t told = loop(true);
    for (std::thread& other : others)
        other.join();
    if (failure)
        std::rethrow_exception(failure);
    tick(blocks - told);
}

// The document index: `epochs` copies of the ids first..last-1, each with its length.
class Documents {
  public:
    // entries a thread takes at a time
    static constexpr std::int64_t kBlock = std::int64_t{1} << 16;

    // lengths that are read at a time
    static constexpr std::int64_t kChunk = std::int64_t{1} << 18;

    // Lengths are int32, that of id i at byte offset + 4 i of the file. runtime_error: one is
    // negative. The caller bounds the numbers. `chunk`: lengths read at a time; a test makes it
    // small to have several of them.
    template <typename Tick>
    Documents(int fd, std::uint64_t offset, std::int64_t first, std::int64_t last,
              std::int64_t epochs, Tick& tick, std::int64_t chunk = kChunk)
        : count_((last - first) * epochs), pairs_(static_cast<std::uint64_t>(count_)) {
        std::vector<std::int32_t> lengths(static_cast<std::size_t>(std::min(chunk, last - first)));
        for (std::int64_t id = first; id < last;) {
            const std::int64_t count = std::min(chunk, last - id);
            read_at(fd, lengths.data(), static_cast<std::size_t>(count) * 4,
                    offset + 4 * static_cast<std::uint64_t>(id));
            for (std::int64_t epoch = 0; epoch < epochs; ++epoch)
                fill(pairs_.data() + epoch * (last - first) + (id - first), id, count,
                     lengths.data());
            std::int64_t sum = 0;
            for (std::int64_t i = 0; i < count; ++i)
                sum += lengths[static_cast<std::size_t>(i)];
            tokens_ += epochs * sum;
            if (*std::min_element(lengths.begin(), lengths.begin() + count) < 0)
                throw std::runtime_error("a sequence has a negative length");
            id += count;
            tick(count * epochs);
        }
    }

    std::int64_t size() const { return count_; }
    std::int64_t tokens() const { return tokens_; }
    std::int64_t last_length() const { return count_ ? length(pairs_.data()[count_ - 1]) : 0; }

    // RandomState.shuffle of the entries begin..end-1.
    template <typename Tick>
    void shuffle(std::int64_t begin, std::int64_t end, Mt19937& generator, Tick& tick) {
        starts_.clear();
        trainkit::shuffle(pairs_.data() + begin, static_cast<std::uint64_t>(end - begin), generator,
                          tick);
    }

    // The ids as int32 from byte `at` of the file on.
    template <typename Tick>
    void write_ids(int fd, std::uint64_t at, int threads, Tick& tick) {
        starts_.assign(static_cast<std::size_t>(blocks()) + 1, 0);
        const auto make = [&] {
            return [&, ids = std::vector<std::int32_t>(kBlock)](std::int64_t block) mutable {
                const std::int64_t begin = block * kBlock, count = std::min(kBlock, count_ - begin);
                const std::uint64_t* const pairs = pairs_.data() + begin;
                std::int64_t sum = 0;
                for (std::int64_t i = 0; i < count; ++i) {
                    ids[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(pairs[i] >> 32);
                    sum += length(pairs[i]);
                }
                starts_[static_cast<std::size_t>(block) + 1] = sum;
                write_at(fd, ids.data(), static_cast<std::size_t>(count) * 4,
                         at + 4 * static_cast<std::uint64_t>(begin));
            };
        };
        over_blocks(blocks(), threads, make, tick);
        for (std::int64_t block = 0; block < blocks(); ++block)
            starts_[static_cast<std::size_t>(block) + 1] +=
                starts_[static_cast<std::size_t>(block)];
    }

    // Rows 0..rows of (position in the document index, token offset), as `Integer`. Row 0 is (0,
    // 0). Row k of samples with one token extra begins in the document that holds token k *
    // seq_length; without, in the first that ends at or after it: that which holds the token
    // before, so that `shift` is all the difference. Rows the tokens do not suffice for point to
    // the end of the last document. After write_ids.
    template <typename Integer, typename Tick>
    void write_samples(int fd, std::uint64_t at, std::int64_t seq_length, int extra,
                       std::int64_t rows, int threads, Tick& tick) const {
        if (starts_.empty())
            throw std::logic_error("write_samples before write_ids");
        const std::int64_t shift = 1 - extra;
        const Integer zero[2] = {0, 0};
        write_at(fd, zero, sizeof zero, at);
        const auto make = [&] {
            return [&, out = Rows<Integer>(fd, at)](std::int64_t block) mutable {
                block_rows(out, block, seq_length, shift, rows);
            };
        };
        over_blocks(blocks(), threads, make, tick);
        const std::int64_t first = std::max<std::int64_t>(1, first_row(tokens_, seq_length, shift));
        Rows<Integer> out(fd, at);
        Integer* row = out.begin(first);
        for (std::int64_t i = first; i <= rows; ++i) {
            *row++ = static_cast<Integer>(count_ - 1);
            *row++ = static_cast<Integer>(last_length() - extra);
            if (row == out.end())
                row = out.flush(row);
        }
        out.flush(row);
    }

  private:
    // Rows on their way to their place in the file.
    template <typename Integer>
    class Rows {
      public:
        Rows(int fd, std::uint64_t at) : fd_(fd), at_(at), buffer_(2 * kRows) {}
        // Where the rows from `row` on are to be put.
        Integer* begin(std::int64_t row) {
            row_ = row;
            return buffer_.data();
        }
        Integer* end() { return buffer_.data() + 2 * kRows; }
        // Writes what stands before `end` and returns where to go on.
        Integer* flush(const Integer* end) {
            const auto values = static_cast<std::size_t>(end - buffer_.data());
            write_at(fd_, buffer_.data(), values * sizeof(Integer),
                     at_ + static_cast<std::uint64_t>(row_) * 2 * sizeof(Integer));
            row_ += static_cast<std::int64_t>(values / 2);
            return buffer_.data();
        }

      private:
        static constexpr std::size_t kRows = std::size_t{1} << 14;
        int fd_;
        std::uint64_t at_;
        std::int64_t row_ = 0;
        std::vector<Integer> buffer_;
    };

    static std::int64_t length(std::uint64_t pair) {
        return static_cast<std::int64_t>(pair & 0xffffffffu);
    }

    static void fill(std::uint64_t* pairs, std::int64_t id, std::int64_t count,
                     const std::int32_t* lengths) {
        for (std::int64_t i = 0; i < count; ++i)
            pairs[i] =
                static_cast<std::uint64_t>(id + i) << 32 | static_cast<std::uint32_t>(lengths[i]);
    }

    // The first row whose token, row * seq_length - shift, is not before `token`.
    static std::int64_t first_row(std::int64_t token, std::int64_t seq_length, std::int64_t shift) {
        return (token + shift + seq_length - 1) / seq_length;
    }

    std::int64_t blocks() const { return (count_ + kBlock - 1) / kBlock; }

    // The rows that begin in a block, from its first document to its last.
    template <typename Integer>
    void block_rows(Rows<Integer>& out, std::int64_t block, std::int64_t seq_length,
                    std::int64_t shift, std::int64_t rows) const {
        std::int64_t start = starts_[static_cast<std::size_t>(block)];
        const std::int64_t first = std::max<std::int64_t>(1, first_row(start, seq_length, shift));
        // no token from here on begins a row
        const std::int64_t stop = rows * seq_length - shift + 1;
        std::int64_t token = first * seq_length - shift;
        const std::int64_t begin = block * kBlock, end = std::min(count_, begin + kBlock);
        const std::uint64_t* const pairs = pairs_.data();
        Integer* row = out.begin(first);
        Integer* const full = out.end();
        for (std::int64_t position = begin; position < end; ++position) {
            const std::int64_t next = start + length(pairs[position]);
            const std::int64_t limit = std::min(next, stop);
            // all ones or none: about every second document begins a row
            const std::int64_t begins = -static_cast<std::int64_t>(token < limit);
            row[0] = static_cast<Integer>(position);
            row[1] = static_cast<Integer>(token - start + shift);
            row += begins & 2;
            token += begins & seq_length;
            if (row == full)
                row = out.flush(row);
            while (token < limit) {
                row[0] = static_cast<Integer>(position);
                row[1] = static_cast<Integer>(token - start + shift);
                row += 2;
                token += seq_length;
                if (row == full)
                    row = out.flush(row);
            }
            start = next;
        }
        out.flush(row);
    }

    std::int64_t count_, tokens_ = 0;
    Memory<std::uint64_t> pairs_;       // id << 32 | length
    std::vector<std::int64_t> starts_;  // token each block begins with
};

// 0..total-1, the first `separate` of them and the others shuffled by themselves, as `Value` from
// byte `at` of the file on.
template <typename Value, typename Tick>
void write_shuffle(Mt19937& generator, std::int64_t separate, std::int64_t total, int fd,
                   std::uint64_t at, Tick& tick) {
    Memory<Value> memory(static_cast<std::uint64_t>(total));
    Value* const values = memory.data();
    for (std::int64_t i = 0; i < total; ++i)
        values[i] = static_cast<Value>(i);
    shuffle(values, static_cast<std::uint64_t>(separate), generator, tick);
    shuffle(values + separate, static_cast<std::uint64_t>(total - separate), generator, tick);
    constexpr std::int64_t kChunk = std::int64_t{1} << 22;
    for (std::int64_t i = 0; i < total; i += kChunk) {
        const std::int64_t count = std::min(kChunk, total - i);
        write_at(fd, values + i, static_cast<std::size_t>(count) * sizeof(Value),
                 at + static_cast<std::uint64_t>(i) * sizeof(Value));
        tick(count);
    }
}

// Megatron's greedy blend: sample i comes from the dataset that is furthest behind, the first of
// equals in weight_d * max(i, 1) - drawn_d. A dataset whose `sizes` are drawn leaves. Datasets to
// int16 and numbers within them to int64 from byte `at` of each file on; drawn counts are left in
// `drawn`.
template <typename Tick>
void write_blend(std::vector<double> weights, std::vector<std::int64_t> sizes, std::int64_t total,
                 int dataset_fd, std::uint64_t dataset_at, int number_fd, std::uint64_t number_at,
                 std::int64_t* drawn, Tick& tick) {
    constexpr std::int64_t kChunk = std::int64_t{1} << 16;
    std::vector<double> counts(weights.size(), 0.0);
    std::vector<std::int16_t> names(weights.size());
    for (std::size_t d = 0; d < names.size(); ++d)
        names[d] = static_cast<std::int16_t>(d);
    std::vector<std::int16_t> datasets(kChunk);
    std::vector<std::int64_t> numbers(kChunk);
    for (std::int64_t begin = 0; begin < total; begin += kChunk) {
        const std::int64_t count = std::min(kChunk, total - begin);
        for (std::int64_t k = 0; k < count; ++k) {
            const double position = static_cast<double>(std::max<std::int64_t>(begin + k, 1));
            std::size_t best = 0;
            double most = weights[0] * position - counts[0];
            for (std::size_t d = 1; d < weights.size(); ++d) {
                const double behind = weights[d] * position - counts[d];
                best = behind > most ? d : best;
                most = behind > most ? behind : most;
            }
            const std::int16_t name = names[best];
            datasets[static_cast<std::size_t>(k)] = name;
            numbers[static_cast<std::size_t>(k)] = drawn[name]++;
            counts[best] += 1.0;
            if (drawn[name] == sizes[static_cast<std::size_t>(name)]) {
                const auto place = static_cast<std::ptrdiff_t>(best);
                weights.erase(weights.begin() + place);
                counts.erase(counts.begin() + place);
                names.erase(names.begin() + place);
            }
        }
        write_at(dataset_fd, datasets.data(), static_cast<std::size_t>(count) * 2,
                 dataset_at + static_cast<std::uint64_t>(begin) * 2);
        write_at(number_fd, numbers.data(), static_cast<std::size_t>(count) * 8,
                 number_at + static_cast<std::uint64_t>(begin) * 8);
        tick(count);
    }
}

}  // namespace trainkit

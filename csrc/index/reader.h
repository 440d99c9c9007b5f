// Tokens of a .bin as int64 rows: mapped or by pread, straight into the caller's batch.
//
// Nothing is trusted. Every access is checked against the file's size when it was opened, whatever
// the arrays hold that lead to it.
//
// Mapped: a page of a file that was cut short after it was mapped raises SIGBUS, which ends the
// process; no program can ask first and be sure. So each call looks at the file's size again before
// it touches the map, and says what happened where it can: a file that shrinks during the very call
// still kills. With pread there is no such signal: a short read is an error like any other.
//
// Resident memory: pages of a map count as the process's until they are unmapped, and their page
// tables stay (2 MB for each GB that was touched). One fault maps what the page cache holds in one
// piece there, up to 2 MB. So the reader counts what it touched in pieces of 2 MB, and makes a new
// map after kKeptBytes of them; the old one goes with the last call that reads from it. The page
// cache keeps the pages.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace trainkit::reading {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, ".bin and .idx are little endian");

// what a row holds where its sample has no token
constexpr std::int64_t kNoToken = -1;
// mapped pages of one reader, about; a smaller file stays mapped
constexpr std::int64_t kKeptBytes = std::int64_t{256} << 20;
constexpr std::int64_t kPiece = std::int64_t{2} << 20;  // what one page fault maps at most
// bytes of one pread: they stay in the cache until they are widened
constexpr std::int64_t kBlock = std::int64_t{64} << 10;

// A failure of the operating system; Python makes an OSError of it.
struct FileError : std::runtime_error {
    FileError(int number, const std::string& words) : std::runtime_error(words), number(number) {}
    int number;
};

// What was read: the least and the greatest id, and places of rows that got no token. Nothing read:
// 0 and -1, between which no id lies.
struct Ids {
    std::int64_t lowest = 0, highest = -1, missing = 0;

    void add(std::int64_t low, std::int64_t high) {
        lowest = any_ ? std::min(lowest, low) : low;
        highest = any_ ? std::max(highest, high) : high;
        any_ = true;
    }

  private:
    bool any_ = false;
};

// Unaligned: arrays of an .idx begin at byte 34.
template <typename T>
T load(const unsigned char* from, std::int64_t index) {
    T value;
    std::memcpy(&value, from + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
}

template <typename T>
inline __attribute__((always_inline)) void widen_of(const unsigned char* from, std::int64_t count,
                                                    std::int64_t* out, std::int64_t limits[2]) {
    T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::min();
    // two loops: a compiler makes vectors of each, but not of both in one
    for (std::int64_t i = 0; i < count; ++i) {
        const T value = load<T>(from, i);
        low = std::min(low, value);
        high = std::max(high, value);
    }
    for (std::int64_t i = 0; i < count; ++i)
        out[i] = static_cast<std::int64_t>(load<T>(from, i));
    limits[0] = static_cast<std::int64_t>(low);
    limits[1] = static_cast<std::int64_t>(high);
}

// The wheel is built for any x86-64; the loader picks what the CPU has. Sanitizers' code cannot run
// that early.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TRAINKIT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define TRAINKIT_CLONES
#endif

// Bytes of one token by the dtype code of .idx; 0: a code that is none of an integer.
inline std::int64_t itemsize_of(int code) {
    switch (code) {
        case 1:
        case 2: return 1;
        case 3:
        case 8: return 2;
        case 4: return 4;
        case 5: return 8;
        default: return 0;
    }
}

// `count` > 0 tokens of dtype `code` as int64; limits: the least and the greatest.
TRAINKIT_CLONES static void widen(int code, const unsigned char* from, std::int64_t count,
                                  std::int64_t* out, std::int64_t limits[2]) {
    switch (code) {
        case 1: return widen_of<std::uint8_t>(from, count, out, limits);
        case 2: return widen_of<std::int8_t>(from, count, out, limits);
        case 3: return widen_of<std::int16_t>(from, count, out, limits);
        case 4: return widen_of<std::int32_t>(from, count, out, limits);
        case 5: return widen_of<std::int64_t>(from, count, out, limits);
        case 8: return widen_of<std::uint16_t>(from, count, out, limits);
    }
}

// Windows of a stream of tokens: number k holds the tokens from (first + k) * S on, S + 1 of them,
// so neighbours share one.
struct Windows {
    std::int64_t first, count;
};

// Megatron's index of samples over the sequences of an .idx. A row (p, o) of sample_index is a
// place: token o of sequence document_index[p].
struct DocumentArrays {
    const unsigned char* document_index;  // int32 [positions]
    std::int64_t positions;
    const unsigned char* sample_index;  // int32 or, if wide, int64 [rows, 2]
    bool wide;
    std::int64_t rows;
    const unsigned char* lengths;  // int32 [sequences]
    const unsigned char* offsets;  // int64 [sequences], bytes
    std::int64_t sequences;
    int extra;  // 1: a sample has the token after its last, too

    std::int64_t place(std::int64_t row, int part) const {
        return wide ? load<std::int64_t>(sample_index, 2 * row + part)
                    : load<std::int32_t>(sample_index, 2 * row + part);
    }
};

class Reader {
  public:
    Reader(const std::string& path, int code, bool mapped)
        : path_(path), code_(code), itemsize_(itemsize_of(code)) {
        if (itemsize_ == 0)
            throw std::invalid_argument("dtype code " + std::to_string(code) +
                                        " is none of an integer");
        fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd_ < 0)
            throw failure("open");
        try {
            size_ = size_now();
            if (mapped && size_ > 0)
                map_ = new_map();
        } catch (...) {
            ::close(fd_);
            throw;
        }
    }

    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    ~Reader() { ::close(fd_); }

    std::int64_t num_tokens() const { return size_ / itemsize_; }

    // out[rows[i]] = the tokens of window numbers[i]. width = S + 1 > 1; rows were checked by the
    // caller.
    Ids windows(const Windows& of, const std::int64_t* numbers, const std::int64_t* rows,
                std::int64_t count, std::int64_t* out, std::int64_t width) {
        Ids ids;
        check_windows(of, numbers, count, width);
        const Map map = checked_map();
        for (std::int64_t i = 0; i < count; ++i)
            read(map.get(), (of.first + numbers[i]) * (width - 1) * itemsize_, width,
                 out + rows[i] * width, ids);
        return ids;
    }

    void ahead(const Windows& of, const std::int64_t* numbers, std::int64_t count,
               std::int64_t width) const {
        check_windows(of, numbers, count, width);
        for (std::int64_t i = 0; i < count; ++i)
            advise((of.first + numbers[i]) * (width - 1) * itemsize_, width * itemsize_);
    }

    // out[rows[i]] = the tokens of sample numbers[i], then kNoToken.
    Ids documents(const DocumentArrays& arrays, const std::int64_t* numbers,
                  const std::int64_t* rows, std::int64_t count, std::int64_t* out,
                  std::int64_t width) {
        Ids ids;
        const Map map = checked_map();
        for (std::int64_t i = 0; i < count; ++i) {
            std::int64_t* const row = out + rows[i] * width;
            std::int64_t done = 0;
            pieces(arrays, numbers[i], width - 1 + arrays.extra,
                   [&](std::int64_t byte, std::int64_t tokens) {
                       read(map.get(), byte, tokens, row + done, ids);
                       done += tokens;
                   });
            std::fill(row + done, row + width, kNoToken);
            ids.missing += width - done;
        }
        return ids;
    }

    void ahead_of_documents(const DocumentArrays& arrays, const std::int64_t* numbers,
                            std::int64_t count, std::int64_t width) const {
        for (std::int64_t i = 0; i < count; ++i) {
            pieces(
                arrays, numbers[i], width - 1 + arrays.extra,
                [&](std::int64_t byte, std::int64_t tokens) { advise(byte, tokens * itemsize_); });
        }
    }

  private:
    using Map = std::shared_ptr<const unsigned char>;

    FileError failure(const char* call) const {
        const int number = errno;
        return FileError(number, path_ + ": " + call + ": " + std::strerror(number));
    }

    FileError shortened(std::int64_t now) const {
        return FileError(EIO, path_ + " had " + std::to_string(size_) +
                                  " bytes when it was opened and has " + std::to_string(now) +
                                  " now");
    }

    std::int64_t size_now() const {
        struct stat about;
        if (::fstat(fd_, &about) != 0)
            throw failure("fstat");
        return static_cast<std::int64_t>(about.st_size);
    }

    Map new_map() const {
        const auto bytes = static_cast<std::size_t>(size_);
        void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd_, 0);
        if (memory == MAP_FAILED)
            throw failure("mmap");
        return Map(static_cast<const unsigned char*>(memory), [bytes](const unsigned char* old) {
            ::munmap(const_cast<unsigned char*>(old), bytes);
        });
    }

    // The map for one call, a new one where enough of the last was touched; null with pread.
    Map checked_map() {
        const std::lock_guard<std::mutex> hold(renewing_);
        if (map_ == nullptr)
            return map_;
        if (const std::int64_t now = size_now(); now < size_)
            throw shortened(now);
        if (size_ > kKeptBytes && touched_ >= kKeptBytes) {
            map_ = new_map();
            touched_ = 0;
        }
        return map_;
    }

    void check_windows(const Windows& of, const std::int64_t* numbers, std::int64_t count,
                       std::int64_t width) const {
        const std::int64_t there = num_tokens() > 0 ? (num_tokens() - 1) / (width - 1) : 0;
        if (of.first < 0 || of.count < 0 || of.count > there || of.first > there - of.count) {
            throw std::invalid_argument(
                "windows " + std::to_string(of.first) + " to " + std::to_string(of.first) + " + " +
                std::to_string(of.count) + " of " + path_ + ", which has " + std::to_string(there));
        }
        for (std::int64_t i = 0; i < count; ++i)
            check_number(numbers[i], of.count);
    }

    static void check_number(std::int64_t number, std::int64_t count) {
        if (number < 0 || number >= count)
            throw std::out_of_range("sample " + std::to_string(number) + " of " +
                                    std::to_string(count));
    }

    // Calls visit(first byte, tokens) for every piece of a sample, in order and within the file. At
    // most `most` tokens in all.
    template <typename Visit>
    void pieces(const DocumentArrays& a, std::int64_t number, std::int64_t most,
                Visit visit) const {
        check_number(number, std::max<std::int64_t>(a.rows - 1, 0));
        const std::int64_t first = a.place(number, 0), begin = a.place(number, 1),
                           last = a.place(number + 1, 0), end = a.place(number + 1, 1);
        if (first < 0 || first > last || last >= a.positions) {
            throw wrong(number, "goes from position " + std::to_string(first) + " to " +
                                    std::to_string(last) + " of " + std::to_string(a.positions));
        }
        std::int64_t left = most;
        for (std::int64_t position = first; position <= last; ++position) {
            const std::int64_t sequence = load<std::int32_t>(a.document_index, position);
            if (sequence < 0 || sequence >= a.sequences) {
                throw wrong(number, "has sequence " + std::to_string(sequence) + " of " +
                                        std::to_string(a.sequences));
            }
            const std::int64_t length = load<std::int32_t>(a.lengths, sequence),
                               offset = load<std::int64_t>(a.offsets, sequence);
            const std::int64_t from = position == first ? begin : 0;
            if (from < 0 || from > length ||
                (position == last && (end > length - a.extra || end + a.extra < from))) {
                throw wrong(number, "has tokens from " + std::to_string(from) + " or to " +
                                        std::to_string(end) + " of sequence " +
                                        std::to_string(sequence) + ", which has " +
                                        std::to_string(length));
            }
            const std::int64_t tokens = (position == last ? end + a.extra : length) - from;
            if (tokens > left)
                throw wrong(number, "has more than " + std::to_string(most) + " tokens");
            if (tokens == 0)
                continue;
            if (offset < 0 || offset > size_ || (from + tokens) * itemsize_ > size_ - offset) {
                throw wrong(number, "lies in sequence " + std::to_string(sequence) + " at byte " +
                                        std::to_string(offset) + ", but " + path_ + " has " +
                                        std::to_string(size_));
            }
            visit(offset + from * itemsize_, tokens);
            left -= tokens;
        }
    }

    static std::invalid_argument wrong(std::int64_t number, const std::string& words) {
        return std::invalid_argument("sample " + std::to_string(number) + " of the sample index " +
                                     words);
    }

    // `tokens` > 0 of them from a byte on, which lie in the file.
    void read(const unsigned char* map, std::int64_t byte, std::int64_t tokens, std::int64_t* out,
              Ids& ids) {
        std::int64_t limits[2];
        if (map != nullptr) {
            widen(code_, map + byte, tokens, out, limits);
            ids.add(limits[0], limits[1]);
            touched_.fetch_add(
                ((byte + tokens * itemsize_ - 1) / kPiece - byte / kPiece + 1) * kPiece,
                std::memory_order_relaxed);
            return;
        }
        alignas(64) unsigned char block[kBlock];
        const std::int64_t most = kBlock / itemsize_;
        for (std::int64_t done = 0; done < tokens;) {
            const std::int64_t part = std::min(most, tokens - done);
            pread_all(block, byte + done * itemsize_, part * itemsize_);
            widen(code_, block, part, out + done, limits);
            ids.add(limits[0], limits[1]);
            done += part;
        }
    }

    void pread_all(unsigned char* to, std::int64_t byte, std::int64_t bytes) const {
        for (std::int64_t done = 0; done < bytes;) {
            const ssize_t got = ::pread(fd_, to + done, static_cast<std::size_t>(bytes - done),
                                        static_cast<off_t>(byte + done));
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0)
                throw failure("pread");
            if (got == 0)
                throw shortened(size_now());
            done += got;
        }
    }

    // A hint; where the system does not take it, reading takes its time.
    void advise(std::int64_t byte, std::int64_t bytes) const {
        ::posix_fadvise(fd_, static_cast<off_t>(byte), static_cast<off_t>(bytes),
                        POSIX_FADV_WILLNEED);
    }

    std::string path_;
    int code_;
    std::int64_t itemsize_, size_ = 0;
    int fd_ = -1;
    std::mutex renewing_;
    Map map_;
    std::atomic<std::int64_t> touched_{0};  // bytes of map_
};

}  // namespace trainkit::reading

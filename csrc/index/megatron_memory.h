// What the large arrays of Megatron's order are kept in, and how they reach a file.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <utility>

namespace trainkit {

// errno of a read or write that failed; 0: the file ended early.
struct FileError : std::exception {
    explicit FileError(int value) : code(value) {}
    const char* what() const noexcept override { return "a file could not be read or written"; }
    int code;
};

// Memory of n values in huge pages where the kernel gives them: random swaps then miss the cache,
// but not the table of pages.
template <typename Value>
class Memory {
  public:
    explicit Memory(std::uint64_t n) {
        if (n > (SIZE_MAX / 2 - kHuge) / sizeof(Value))
            throw std::bad_alloc();
        bytes_ = static_cast<std::size_t>(n) * sizeof(Value) + kHuge;
        base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED)
            throw std::bad_alloc();
        const auto aligned = (reinterpret_cast<std::uintptr_t>(base_) + kHuge - 1) / kHuge * kHuge;
        values_ = reinterpret_cast<Value*>(aligned);
        // an advice: refused, it only takes longer
        if (bytes_ >= 4 * kHuge)
            madvise(values_, bytes_ - kHuge, MADV_HUGEPAGE);
    }
    ~Memory() { munmap(base_, bytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Value* data() { return values_; }
    const Value* data() const { return values_; }

  private:
    static constexpr std::size_t kHuge = std::size_t{1} << 21;
    void* base_;
    std::size_t bytes_;
    Value* values_;
};

inline void write_at(int fd, const void* data, std::size_t bytes, std::uint64_t at) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t done = pwrite(fd, from, std::min<std::size_t>(bytes, std::size_t{1} << 30),
                                    static_cast<off_t>(at));
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            throw FileError(done < 0 ? errno : ENOSPC);
        from += done;
        at += static_cast<std::uint64_t>(done);
        bytes -= static_cast<std::size_t>(done);
    }
}

inline void read_at(int fd, void* data, std::size_t bytes, std::uint64_t at) {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
        const ssize_t done = pread(fd, to, std::min<std::size_t>(bytes, std::size_t{1} << 30),
                                   static_cast<off_t>(at));
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            throw FileError(done < 0 ? errno : 0);
        to += done;
        at += static_cast<std::uint64_t>(done);
        bytes -= static_cast<std::size_t>(done);
    }
}

}  // namespace trainkit

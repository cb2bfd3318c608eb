#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "megatronapp/mapped_file.hpp"
#include "megatronapp/transport/shm/layout.hpp"

namespace megatronapp::transport::testing {

/// The first bytes of a file in shared memory as words, which a third process could write.
class SharedWords {
  public:
    SharedWords(const std::string& path, std::uint64_t bytes) : bytes_(bytes) {
        const FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
        void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        words_ = data == MAP_FAILED ? nullptr : static_cast<Word*>(data);
    }
    SharedWords(SharedWords&& other) noexcept : words_(std::exchange(other.words_, nullptr)), bytes_(other.bytes_) {}
    SharedWords& operator=(SharedWords&&) = delete;
    SharedWords(const SharedWords&) = delete;
    SharedWords& operator=(const SharedWords&) = delete;
    ~SharedWords() {
        if (words_ != nullptr) {
            ::munmap(words_, bytes_);
        }
    }

    [[nodiscard]] Word& word(std::uint64_t index) const { return words_[index]; }
    [[nodiscard]] std::uint64_t count() const { return bytes_ / sizeof(Word); }
    [[nodiscard]] bool valid() const { return words_ != nullptr; }
    [[nodiscard]] std::byte* data() const { return reinterpret_cast<std::byte*>(words_); }

  private:
    Word* words_;
    std::uint64_t bytes_;
};

}  // namespace megatronapp::transport::testing

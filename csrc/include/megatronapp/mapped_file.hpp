#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace megatronapp {

/// Owns a file descriptor.
class FileDescriptor {
  public:
    explicit FileDescriptor(int fd = -1) noexcept : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept;
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor();

    [[nodiscard]] int get() const noexcept { return fd_; }
    [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }

  private:
    int fd_;
};

/// A shared mapping of a whole file.
class MappedFile {
  public:
    /// Makes a file (mode 0640) that is backed by memory to its last page, and maps it for writing. It appears
    /// under `path` only through `publish`. Raises RingError, and leaves no file, where there is no room.
    static MappedFile create(const std::string& path, std::uint64_t bytes);

    /// Maps an existing regular file for reading. Raises RingError if it is not one or has fewer bytes.
    static MappedFile open(const std::string& path, std::uint64_t min_bytes);

    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&&) = delete;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    ~MappedFile();

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

    /// Whether the file is still as long as the mapping; touching a page beyond its end would raise SIGBUS.
    [[nodiscard]] bool intact() const noexcept;

    /// Moves the finished file to its name, in one step.
    void publish();

  private:
    MappedFile(FileDescriptor fd, std::byte* data, std::uint64_t bytes, std::string path, std::string draft);

    FileDescriptor fd_;
    std::byte* data_;
    std::uint64_t bytes_;
    std::string path_;
    std::string draft_;  // its name until it is published; empty afterwards
};

}  // namespace megatronapp

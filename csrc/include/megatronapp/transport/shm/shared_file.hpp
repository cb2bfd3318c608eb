#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "megatronapp/mapped_file.hpp"
#include "megatronapp/transport/shm/life_lock.hpp"

namespace megatronapp::transport {

/// A mapping of a whole file in shared memory, with all its pages present.
///
/// A file is made without a name and gets it when it is whole and locked. So a named file without a lock is that of a
/// dead process, and no process can die with a half-made file under any name.
class SharedFile {
  public:
    /// Makes a file of zeros beside `path`. Raises TransportError where there is no room or the file system cannot.
    static SharedFile create(const std::string& path, std::uint64_t bytes);

    /// Maps an existing file, none if there is no such name. Raises TransportError, also if it has fewer bytes.
    static std::optional<SharedFile> open(const std::string& path, std::uint64_t min_bytes);

    SharedFile(SharedFile&& other) noexcept;
    SharedFile& operator=(SharedFile&& other) noexcept;
    SharedFile(const SharedFile&) = delete;
    SharedFile& operator=(const SharedFile&) = delete;
    /// Unmaps the file, and removes its name if this object gave it.
    ~SharedFile();

    /// Gives the file its name; false if another file has it.
    [[nodiscard]] bool publish();

    /// Removes the name; those who have the file open go on.
    void remove_name() noexcept;

    /// Holds the lock of this file until the result is destroyed.
    [[nodiscard]] LifeLock lock() const;

    /// Whether any process holds the lock.
    [[nodiscard]] bool locked() const noexcept { return LifeLock::held(fd_.get()); }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] const std::string& path() const noexcept { return path_; }

  private:
    SharedFile(FileDescriptor fd, std::byte* data, std::uint64_t bytes, std::string path);

    FileDescriptor fd_;
    std::byte* data_;
    std::uint64_t bytes_;
    std::string path_;
    bool named_ = false;
};

}  // namespace megatronapp::transport

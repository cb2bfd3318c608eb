#pragma once

#include <cstddef>
#include <string>

namespace megatronapp::transport {

/// A write lock of an open file description (F_OFD_SETLK) on a file, held as long as this process lives. The kernel
/// ends it with the process, however that ends, and any process that has the file open can ask for it: no process
/// ids, which mean nothing in another pid namespace.
///
/// A forked child would share the description and keep the lock after its parent's death, so that a handler closes
/// it in each child. For the same reason the description must not be mapped: a mapping keeps it open.
class LifeLock {
  public:
    /// Opens `path` anew and locks it. Raises TransportError.
    explicit LifeLock(const std::string& path);
    LifeLock(LifeLock&& other) noexcept;
    LifeLock& operator=(LifeLock&&) = delete;
    LifeLock(const LifeLock&) = delete;
    LifeLock& operator=(const LifeLock&) = delete;
    ~LifeLock();

    /// Whether any process holds the lock of this file.
    [[nodiscard]] static bool held(int fd) noexcept;

  private:
    std::size_t place_;
};

}  // namespace megatronapp::transport

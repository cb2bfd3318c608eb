#include "megatronapp/transport/shm/life_lock.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "megatronapp/transport/errors.hpp"

// glibc declares these only with _GNU_SOURCE; the numbers are part of the kernel's interface.
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

namespace megatronapp::transport {
namespace {

constexpr std::size_t kMostLocks = 256;
constexpr std::size_t kNowhere = kMostLocks;
constexpr int kFree = -1;
constexpr int kReserved = -2;

/// Descriptors that a forked child closes: of fixed size, as its handler may neither lock nor allocate.
struct Table {
    Table() noexcept {
        for (std::atomic<int>& fd : descriptors) {
            fd.store(kFree);
        }
    }

    std::array<std::atomic<int>, kMostLocks> descriptors;
};

std::array<std::atomic<int>, kMostLocks>& descriptors() noexcept {
    static Table table;
    return table.descriptors;
}

void close_in_child() noexcept {
    for (std::atomic<int>& entry : descriptors()) {
        const int fd = entry.exchange(kFree);
        if (fd >= 0) {
            ::close(fd);
        }
    }
}

bool watch_forks() noexcept {
    static_cast<void>(descriptors());
    return ::pthread_atfork(nullptr, nullptr, close_in_child) == 0;
}

std::size_t reserve() {
    static const bool watched = watch_forks();
    for (std::size_t i = 0; watched && i < kMostLocks; ++i) {
        int expected = kFree;
        if (descriptors()[i].compare_exchange_strong(expected, kReserved)) {
            return i;
        }
    }
    throw TransportError("this process has " + std::to_string(kMostLocks) + " endpoints; close some of them");
}

struct flock whole_file() noexcept {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return lock;
}

}  // namespace

LifeLock::LifeLock(const std::string& path) : place_(reserve()) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct flock lock = whole_file();
    if (fd < 0 || ::fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        const int code = errno;
        if (fd >= 0) {
            ::close(fd);
        }
        descriptors()[place_].store(kFree);
        throw TransportError(path + ": cannot lock it: " + std::generic_category().message(code));
    }
    descriptors()[place_].store(fd);
}

LifeLock::LifeLock(LifeLock&& other) noexcept : place_(std::exchange(other.place_, kNowhere)) {}

LifeLock::~LifeLock() {
    if (place_ == kNowhere) {
        return;
    }
    const int fd = descriptors()[place_].exchange(kFree);
    if (fd >= 0) {
        ::close(fd);
    }
}

bool LifeLock::held(int fd) noexcept {
    struct flock lock = whole_file();
    return ::fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

}  // namespace megatronapp::transport

#include "megatronapp/transport/shm/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "megatronapp/transport/errors.hpp"

// glibc declares it only with _GNU_SOURCE; the number is part of the kernel's interface.
#ifndef O_TMPFILE
#define O_TMPFILE (020000000 | O_DIRECTORY)
#endif

namespace megatronapp::transport {
namespace {

constexpr mode_t kMode = 0600;

[[noreturn]] void fail(const std::string& path, const std::string& what, int code) {
    throw TransportError(path + ": " + what + ": " + std::generic_category().message(code));
}

std::string name_of(const FileDescriptor& fd) { return "/proc/self/fd/" + std::to_string(fd.get()); }

/// MAP_POPULATE: no page fault while messages travel.
std::byte* map(const FileDescriptor& fd, std::uint64_t bytes) noexcept {
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
    return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

}  // namespace

SharedFile SharedFile::create(const std::string& path, std::uint64_t bytes) {
    const std::string directory = std::filesystem::path(path).parent_path().string();
    FileDescriptor fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kMode));
    if (!fd.valid()) {
        fail(directory, "cannot make a file here without a name; set MEGATRONAPP_SHM_DIR to a tmpfs such as /dev/shm",
             errno);
    }
    int code = EINTR;
    while (code == EINTR) {
        code = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
    }
    if (code != 0) {
        fail(path,
             "no room for " + std::to_string(bytes) + " bytes; enlarge this file system, or use fewer or smaller slots",
             code);
    }
    std::byte* data = map(fd, bytes);
    if (data == nullptr) {
        fail(path, "cannot map it", errno);
    }
    return {std::move(fd), data, bytes, path};
}

std::optional<SharedFile> SharedFile::open(const std::string& path, std::uint64_t min_bytes) {
    FileDescriptor fd(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!fd.valid()) {
        if (errno == ENOENT) {
            return std::nullopt;
        }
        fail(path, "cannot open it", errno);
    }
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) {
        fail(path, "cannot examine it", errno);
    }
    const auto bytes = static_cast<std::uint64_t>(status.st_size);
    if (!S_ISREG(status.st_mode) || bytes < min_bytes) {
        throw TransportMismatchError(path + ": not a file of this transport, or of another version; remove it");
    }
    std::byte* data = map(fd, bytes);
    if (data == nullptr) {
        fail(path, "cannot map it", errno);
    }
    return SharedFile(std::move(fd), data, bytes, path);
}

SharedFile::SharedFile(FileDescriptor fd, std::byte* data, std::uint64_t bytes, std::string path)
    : fd_(std::move(fd)), data_(data), bytes_(bytes), path_(std::move(path)) {}

SharedFile::SharedFile(SharedFile&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      path_(std::move(other.path_)),
      named_(std::exchange(other.named_, false)) {}

SharedFile& SharedFile::operator=(SharedFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(path_, other.path_);
    std::swap(named_, other.named_);
    return *this;
}

SharedFile::~SharedFile() {
    remove_name();
    if (data_ != nullptr) {
        ::munmap(data_, bytes_);
    }
}

bool SharedFile::publish() {
    if (::linkat(AT_FDCWD, name_of(fd_).c_str(), AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) == 0) {
        named_ = true;
        return true;
    }
    if (errno == EEXIST) {
        return false;
    }
    fail(path_, "cannot give the file its name", errno);
}

void SharedFile::remove_name() noexcept {
    if (std::exchange(named_, false)) {
        ::unlink(path_.c_str());
    }
}

LifeLock SharedFile::lock() const { return LifeLock(name_of(fd_)); }

}  // namespace megatronapp::transport

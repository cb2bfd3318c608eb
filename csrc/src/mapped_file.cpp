#include "megatronapp/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "megatronapp/error.hpp"

namespace megatronapp {
namespace {

constexpr mode_t kMode = 0640;

[[noreturn]] void fail(const std::string& path, const std::string& what, int code) {
    throw RingError(path + ": " + what + ": " + std::generic_category().message(code));
}

/// A name beside the final one. O_EXCL with the removal of a leftover keeps us from writing through a planted link.
FileDescriptor create_draft(const std::string& path, const std::string& draft) {
    ::unlink(draft.c_str());
    FileDescriptor fd(::open(draft.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kMode));
    if (!fd.valid()) {
        fail(path, "cannot create the ring", errno);
    }
    if (::fchmod(fd.get(), kMode) != 0) {  // whatever the umask took away
        const int code = errno;
        ::unlink(draft.c_str());
        fail(path, "cannot set the mode of the ring", code);
    }
    return fd;
}

int allocate(int fd, std::uint64_t bytes) noexcept {
    int code = EINTR;
    while (code == EINTR) {
        code = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    }
    return code;
}

std::byte* map(int fd, std::uint64_t bytes, int protection) noexcept {
    void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
    return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

FileDescriptor open_regular(const std::string& path, std::uint64_t min_bytes, std::uint64_t& bytes) {
    FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!fd.valid()) {
        fail(path, "cannot open the ring", errno);
    }
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) {
        fail(path, "cannot examine the ring", errno);
    }
    if (!S_ISREG(status.st_mode)) {
        throw RingError(path + ": not a ring: not a regular file");
    }
    bytes = static_cast<std::uint64_t>(status.st_size);
    if (bytes < min_bytes) {
        throw RingError(path + ": not a ring: " + std::to_string(bytes) + " bytes, a header alone has " +
                        std::to_string(min_bytes));
    }
    return fd;
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

FileDescriptor::~FileDescriptor() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

MappedFile MappedFile::create(const std::string& path, std::uint64_t bytes) {
    const std::string draft = path + ".new";
    FileDescriptor fd = create_draft(path, draft);
    const int code = allocate(fd.get(), bytes);
    if (code != 0) {
        ::unlink(draft.c_str());
        fail(path, "no room for a ring of " + std::to_string(bytes) + " bytes", code);
    }
    std::byte* data = map(fd.get(), bytes, PROT_READ | PROT_WRITE);
    if (data == nullptr) {
        const int map_code = errno;
        ::unlink(draft.c_str());
        fail(path, "cannot map the ring", map_code);
    }
    std::memset(data, 0, bytes);  // touch every page now, so that no fault happens while training
    return {std::move(fd), data, bytes, path, draft};
}

MappedFile MappedFile::open(const std::string& path, std::uint64_t min_bytes) {
    std::uint64_t bytes = 0;
    FileDescriptor fd = open_regular(path, min_bytes, bytes);
    std::byte* data = map(fd.get(), bytes, PROT_READ);
    if (data == nullptr) {
        fail(path, "cannot map the ring", errno);
    }
    return {std::move(fd), data, bytes, path, ""};
}

MappedFile::MappedFile(FileDescriptor fd, std::byte* data, std::uint64_t bytes, std::string path, std::string draft)
    : fd_(std::move(fd)), data_(data), bytes_(bytes), path_(std::move(path)), draft_(std::move(draft)) {}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      path_(std::move(other.path_)),
      draft_(std::exchange(other.draft_, {})) {}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        ::munmap(data_, bytes_);
    }
    if (!draft_.empty()) {
        ::unlink(draft_.c_str());
    }
}

bool MappedFile::intact() const noexcept {
    struct stat status {};
    return ::fstat(fd_.get(), &status) == 0 && static_cast<std::uint64_t>(status.st_size) >= bytes_;
}

void MappedFile::publish() {
    if (std::rename(draft_.c_str(), path_.c_str()) != 0) {
        fail(path_, "cannot give the ring its name", errno);
    }
    draft_.clear();
}

}  // namespace megatronapp

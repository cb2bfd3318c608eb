#include "megatronapp/run_queue.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "megatronapp/fork_count.hpp"
#include "megatronapp/mapped_file.hpp"

namespace megatronapp {
namespace {

/// An open file stays bound to the thread that opened it, also in a forked child: each fork asks for new ones.
struct Schedstat {
    FileDescriptor fd;
    std::uint64_t opened_at_fork;
};

Schedstat open_schedstat() noexcept {
    return {FileDescriptor(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)), fork_count()};
}

int schedstat_fd() noexcept {
    thread_local Schedstat file = open_schedstat();
    if (file.opened_at_fork != fork_count()) {
        file = open_schedstat();
    }
    return file.fd.get();
}

}  // namespace

std::uint64_t run_queue_ns() noexcept {
    std::array<char, 96> text{};
    if (::pread(schedstat_fd(), text.data(), text.size() - 1, 0) <= 0) {
        return 0;
    }
    char* after_run_time = nullptr;
    static_cast<void>(std::strtoull(text.data(), &after_run_time, 10));
    return std::strtoull(after_run_time, nullptr, 10);
}

}  // namespace megatronapp

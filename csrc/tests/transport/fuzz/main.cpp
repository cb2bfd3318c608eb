/// transport_fuzz CASES [TARGET [SEED]]: runs so many cases of each target, from a seed that is drawn unless given.
///
/// The cases run in a child process, so that a crash is reported with its seed: transport_fuzz 1 TARGET SEED runs it
/// again. The seed decides on all but the moments of threads.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <iostream>
#include <new>
#include <optional>
#include <random>
#include <string_view>

#include "fuzz.hpp"

namespace megatronapp::transport::fuzzing {
namespace {

constexpr std::array kTargets{NamedTarget{"transfers", fuzz_transfers}, NamedTarget{"connecting", fuzz_connecting},
                              NamedTarget{"network", fuzz_network}};
constexpr int kHangMs = 60'000;  // a case has deadlines below one second
constexpr int kUsage = 64;

struct Progress {
    std::atomic<std::uint64_t> ended;
    std::atomic<std::uint64_t> seed;
};

Progress* shared_progress() {
    void* memory = ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : new (memory) Progress{};
}

int run_cases(const NamedTarget& target, std::uint64_t first, std::uint64_t count, Progress& progress) {
    for (std::uint64_t i = 0; i < count; ++i) {
        progress.seed.store(first + i);
        try {
            target.run(first + i);
        } catch (const std::exception& error) {
            std::cerr << "transport_fuzz: " << error.what() << '\n';
            return 1;
        }
        progress.ended.store(i + 1);
    }
    return 0;
}

/// Waits for the end of the child as long as it ends cases; kills it otherwise. Its wait status, none if it hung.
std::optional<int> wait_for(pid_t child, const Progress& progress) {
    const int fd = static_cast<int>(::syscall(SYS_pidfd_open, child, 0));
    std::uint64_t seen = ~std::uint64_t{0};
    bool ended = fd < 0;
    bool hung = false;
    while (!ended && !hung) {
        const std::uint64_t before = progress.ended.load();
        hung = before == seen;
        seen = before;
        pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
        ended = !hung && ::poll(&entry, 1, kHangMs) == 1;
    }
    if (hung) {
        ::kill(child, SIGKILL);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (fd >= 0) {
        ::close(fd);
    }
    return hung ? std::nullopt : std::optional(status);
}

/// Whether all cases of a target ended as they should.
bool run_target(const NamedTarget& target, std::uint64_t first, std::uint64_t count, Progress& progress) {
    progress.ended.store(0);
    std::cout.flush();
    const pid_t child = ::fork();
    if (child == 0) {
        ::_exit(run_cases(target, first, count, progress));
    }
    const std::optional<int> status = wait_for(child, progress);
    if (status == 0) {
        std::cout << "transport_fuzz: " << count << " cases of " << target.name << " from seed " << first << '\n';
        return true;
    }
    std::cerr << "transport_fuzz: ";
    if (status && WIFSIGNALED(*status)) {
        std::cerr << "ended by signal " << WTERMSIG(*status);
    } else {
        std::cerr << (status ? "failed" : "hung");
    }
    std::cerr << "; again: transport_fuzz 1 " << target.name << ' ' << progress.seed.load() << '\n';
    return false;
}

std::optional<std::uint64_t> number_of(std::string_view text) {
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

std::uint64_t drawn_seed() {
    std::random_device random;
    return std::uint64_t{random()} << 16U;
}

int run(int count, char** words) {
    const std::optional<std::uint64_t> cases = count > 1 ? number_of(words[1]) : std::nullopt;
    const std::optional<std::uint64_t> first = count > 3 ? number_of(words[3]) : drawn_seed();
    Progress* progress = shared_progress();
    bool known = false;
    bool well = true;
    for (const NamedTarget& target : kTargets) {
        if (cases && first && progress != nullptr && (count < 3 || std::string_view(words[2]) == target.name)) {
            known = true;
            well = run_target(target, *first, *cases, *progress) && well;
        }
    }
    if (!known) {
        std::cerr << "usage: transport_fuzz CASES [transfers | connecting | network [SEED]]\n";
        return kUsage;
    }
    return well ? 0 : 1;
}

}  // namespace
}  // namespace megatronapp::transport::fuzzing

int main(int count, char** words) { return megatronapp::transport::fuzzing::run(count, words); }

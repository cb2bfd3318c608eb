/* Two ranks, forked, exchange messages through the C interface; exit code 0, or the line of the first wrong check. */
#define _POSIX_C_SOURCE 200809L

#include "megatronapp/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOT_BYTES 70000
#define SLOTS 4
#define MESSAGES 12
#define DEADLINE_S 60.0

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, megatronapp_transport_error()); \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

static unsigned char contents[2][MESSAGES][SLOT_BYTES];

static uint64_t size_of(uint64_t key) { return key == 0 ? 0 : key * 5000 + 1; }

static void fill(void) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
        for (uint64_t key = 0; key < MESSAGES; ++key) {
            for (uint64_t i = 0; i < size_of(key); ++i) {
                contents[rank][key][i] = (unsigned char)(rank * 101 + key * 31 + i * 7 + i / 251);
            }
        }
    }
}

static void receive_in_reverse(megatronapp_transport* transport, uint32_t peer, uint64_t first) {
    for (uint64_t key = first + SLOTS; key-- > first;) {
        megatronapp_message* message = NULL;
        CHECK(megatronapp_transport_receive(transport, peer, key, DEADLINE_S, &message) == MEGATRONAPP_OK);
        CHECK(message->key == key && message->peer == peer && message->bytes == size_of(key));
        CHECK(message->queued_ns <= message->start_ns && message->start_ns <= message->end_ns);
        CHECK(memcmp(message->data, contents[peer][key], (size_t)message->bytes) == 0);
        megatronapp_message_release(message);
    }
}

static void exchange(megatronapp_transport* transport, uint32_t rank) {
    const uint32_t peer = 1 - rank;
    for (uint64_t key = 0; key < MESSAGES; ++key) {
        if (key % 3 == 2) { /* the end first */
            const uint64_t half = size_of(key) / 2;
            const struct megatronapp_part parts[2] = {{contents[rank][key] + half, half, size_of(key) - half},
                                                      {contents[rank][key], 0, half}};
            CHECK(megatronapp_transport_send_parts(transport, peer, key, parts, 2, size_of(key), NULL) ==
                  MEGATRONAPP_OK);
            continue;
        }
        CHECK(megatronapp_transport_send(transport, peer, key, contents[rank][key], size_of(key), NULL) ==
              MEGATRONAPP_OK);
    }
    for (uint64_t first = 0; first < MESSAGES; first += SLOTS) {
        receive_in_reverse(transport, peer, first);
    }
    megatronapp_message* none = NULL;
    CHECK(megatronapp_transport_poll(transport, peer, 0, &none) == MEGATRONAPP_OK && none == NULL);
}

static void expect_errors(megatronapp_transport* transport, uint32_t peer) {
    megatronapp_message* message = NULL;
    CHECK(megatronapp_transport_receive(transport, peer, 999, 0.01, &message) == MEGATRONAPP_TIMEOUT);
    CHECK(message == NULL && strstr(megatronapp_transport_error(), "key 0x3e7: nothing within 0.01 s") != NULL);
    CHECK(megatronapp_transport_poll(transport, 7, 1, &message) == MEGATRONAPP_ERROR);
    CHECK(strstr(megatronapp_transport_error(), "rank 7 is not connected") != NULL);
    CHECK(megatronapp_transport_send(transport, peer, 1, NULL, 1, NULL) == MEGATRONAPP_ERROR);
    const struct megatronapp_part twice[2] = {{contents, 0, 2}, {contents, 1, 2}};
    CHECK(megatronapp_transport_send_parts(transport, peer, 1, twice, 2, 3, NULL) == MEGATRONAPP_ERROR);
    CHECK(megatronapp_transport_send_parts(transport, peer, 1, NULL, 1, 3, NULL) == MEGATRONAPP_ERROR);
    CHECK(megatronapp_transport_send(transport, peer, 1, contents, SLOT_BYTES + 1, NULL) == MEGATRONAPP_ERROR);
    CHECK(strstr(megatronapp_transport_error(), "give all ranks larger slots") != NULL);
}

/* One ticket for each message that was sent, the last one among them. */
static void expect_completed(megatronapp_transport* transport, uint64_t last) {
    uint64_t tickets[5];
    size_t all = 0;
    size_t count = 0;
    int found = 0;
    do {
        CHECK(megatronapp_transport_completed(transport, tickets, 5, &count) == MEGATRONAPP_OK && count <= 5);
        for (size_t i = 0; i < count; ++i) {
            found += tickets[i] == last;
        }
        all += count;
    } while (count > 0);
    CHECK(all == MESSAGES + 1 && found == 1);
}

/* The first rank sends key 50 twice and closes once the second one is ready for that, which waits for key 50. */
static void finish(megatronapp_transport* transport, uint32_t rank) {
    struct megatronapp_statistics statistics;
    if (rank == 0) {
        uint64_t ticket = 0;
        megatronapp_message* ready = NULL;
        CHECK(megatronapp_transport_receive(transport, 1, 60, DEADLINE_S, &ready) == MEGATRONAPP_OK);
        megatronapp_message_release(ready);
        CHECK(megatronapp_transport_send(transport, 1, 50, contents[0][2], size_of(2), &ticket) == MEGATRONAPP_OK);
        const int again = megatronapp_transport_send(transport, 1, 50, contents[0][2], size_of(2), NULL);
        CHECK(again == MEGATRONAPP_DUPLICATE_KEY);
        CHECK(megatronapp_transport_close(transport, 1) == MEGATRONAPP_OK);
        expect_completed(transport, ticket);
        return;
    }
    CHECK(megatronapp_transport_send(transport, 0, 60, NULL, 0, NULL) == MEGATRONAPP_OK);
    megatronapp_message* message = NULL;
    uint32_t activity = 0;
    int changed = 1;
    while (message == NULL) {
        CHECK(changed);
        CHECK(megatronapp_transport_activity(transport, &activity) == MEGATRONAPP_OK);
        CHECK(megatronapp_transport_poll(transport, 0, 50, &message) == MEGATRONAPP_OK);
        if (message == NULL) {
            CHECK(megatronapp_transport_wait(transport, activity, DEADLINE_S, &changed) == MEGATRONAPP_OK);
        }
    }
    CHECK(megatronapp_transport_statistics(transport, 0, &statistics) == MEGATRONAPP_OK);
    CHECK(strcmp(statistics.path, "host memory") == 0);
    CHECK(statistics.sent.transfers == MESSAGES + 1 && statistics.received.transfers == MESSAGES + 1);
    megatronapp_message* lost = NULL;
    CHECK(megatronapp_transport_receive(transport, 0, 51, DEADLINE_S, &lost) == MEGATRONAPP_PEER_LOST);
    CHECK(megatronapp_transport_close(transport, 1) == MEGATRONAPP_OK);
    megatronapp_transport_destroy(transport);
    CHECK(memcmp(message->data, contents[0][2], (size_t)message->bytes) == 0); /* it outlives its transport */
    megatronapp_message_release(message);
    megatronapp_message_release(NULL);
}

static int run_rank(const char* directory, uint32_t rank) {
    struct megatronapp_transport_options options = {directory, "a/b", 1, rank, SLOT_BYTES, SLOTS, DEADLINE_S, 1};
    megatronapp_transport* transport = NULL;
    CHECK(megatronapp_transport_create(&options, &transport) == MEGATRONAPP_ERROR && transport == NULL);
    CHECK(megatronapp_transport_create(NULL, &transport) == MEGATRONAPP_ERROR);
    options.job = "job";
    CHECK(megatronapp_transport_create(&options, &transport) == MEGATRONAPP_OK);
    CHECK(megatronapp_transport_add_peer(transport, 1 - rank) == MEGATRONAPP_OK);
    CHECK(megatronapp_transport_connect(transport) == MEGATRONAPP_OK);
    exchange(transport, rank);
    expect_errors(transport, 1 - rank);
    finish(transport, rank);
    if (rank == 0) {
        megatronapp_transport_destroy(transport);
    }
    megatronapp_transport_destroy(NULL);
    return 0;
}

int main(void) {
    const char* parent = getenv("TMPDIR");
    char directory[4096];
    pid_t ranks[2];
    int failures = 0;
    snprintf(directory, sizeof(directory), "%s/transport-c-XXXXXX", parent == NULL ? "/tmp" : parent);
    if (mkdtemp(directory) == NULL) {
        perror(directory);
        return 1;
    }
    fill();
    for (uint32_t rank = 0; rank < 2; ++rank) {
        ranks[rank] = fork();
        if (ranks[rank] == 0) {
            return run_rank(directory, rank);
        }
    }
    for (int rank = 0; rank < 2; ++rank) {
        int status = 1;
        failures += waitpid(ranks[rank], &status, 0) != ranks[rank] || status != 0;
    }
    failures += rmdir(directory) != 0; /* no file is left in it */
    return failures == 0 ? 0 : 1;
}

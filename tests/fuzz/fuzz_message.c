/* message_receive() on packets of any kind, and everything that reads a message. The input is a list of packets, each
 * after its length in two bytes; they may carry descriptors. */
#include "slot.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct slot_config slot;

static void send_packet(int sock, const uint8_t *data, size_t size, int n_fds) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {(void *)data, size};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds) {
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        for (int i = 0; i < n_fds; i++) memcpy(CMSG_DATA(c) + (size_t)i * sizeof(int), &(int){2}, sizeof(int));
    }
    sendmsg(sock, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void read_all_of(const struct message *message) {
    size_t seen = strlen(message_op(message));
    for (const char *v = NULL; (v = message_next(message, "k", v));) seen += strlen(v);
    seen += (size_t)message_number(message, "n", -1);
    const char *text = message_get(message, "text");
    if (text) seen += strlen(text);
    for (size_t i = 0; i < message->raw_size; i++) seen += (size_t)message->raw[i];
    static volatile size_t kept;
    kept = seen;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return 0;
    while (size >= 2) {
        size_t length = (size_t)(data[0] | (data[1] & 0x0f) << 8);
        int n_fds = data[1] >> 4;
        data += 2, size -= 2;
        if (length > size) length = size;
        send_packet(ends[0], data, length, n_fds);
        data += length, size -= length;
    }
    close(ends[0]);
    for (struct message message;;) {
        bool got = message_receive(ends[1], &message);
        if (got) read_all_of(&message);
        message_free(&message);
        if (!got) break;
    }
    close(ends[1]);
    return 0;
}

/* System calls no slot needs and every escape starts with: refused with EPERM, as container runtimes do. */
#include "slot.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#else
#error "no seccomp filter for this architecture"
#endif
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

/* CLONE_NEWTIME shares its bit with clone's exit signal, so clone() cannot ask for it and unshare is refused anyway. */
#define NAMESPACE_FLAGS (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

static const int denied[] = {
    SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_unshare, SYS_setns, SYS_swapon, SYS_swapoff,
    428 /* open_tree */, 429 /* move_mount */, 430 /* fsopen */, 431 /* fsconfig */, 432 /* fsmount */,
    433 /* fspick */, 442 /* mount_setattr */, 467 /* open_tree_attr */,
    SYS_keyctl, SYS_add_key, SYS_request_key, SYS_bpf, SYS_userfaultfd, SYS_perf_event_open,
    425 /* io_uring_setup */, 426, 427, SYS_kexec_load, SYS_kexec_file_load, SYS_reboot, SYS_acct,
    SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_open_by_handle_at, SYS_name_to_handle_at,
    SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime, SYS_syslog, SYS_quotactl,
    SYS_lookup_dcookie, SYS_nfsservctl, SYS_vhangup, SYS_sethostname, SYS_setdomainname, SYS_move_pages,
    SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp, SYS_fanotify_init,
#ifdef __x86_64__
    SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_create_module, SYS_get_kernel_syms, SYS_query_module, SYS__sysctl,
#endif
};

/* What they make outlives every process. Without an IPC namespace or a user of its own nobody could tell whose it is. */
static const int lasting[] = {SYS_shmget, SYS_msgget, SYS_semget, SYS_mq_open};

struct program {
    struct sock_filter code[200];
    unsigned short length;
};

static void emit(struct program *p, unsigned short op, unsigned int k, unsigned char yes, unsigned char no) {
    p->code[p->length++] = (struct sock_filter){op, yes, no, k};
}

static void load(struct program *p, size_t offset) { emit(p, BPF_LD | BPF_W | BPF_ABS, (unsigned int)offset, 0, 0); }

static void give(struct program *p, unsigned int action) { emit(p, BPF_RET | BPF_K, action, 0, 0); }

static void deny_namespaces(struct program *p) {
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3);
    load(p, offsetof(struct seccomp_data, args[0]));
    emit(p, BPF_JMP | BPF_JSET | BPF_K, NAMESPACE_FLAGS, 0, 2);
    give(p, SECCOMP_RET_ERRNO | EPERM);
    emit(p, BPF_JMP | BPF_JA, 1, 0, 0);
    give(p, SECCOMP_RET_ALLOW);
    /* clone3 hides its flags behind a pointer; ENOSYS makes every libc fall back to clone. */
    load(p, offsetof(struct seccomp_data, nr));
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 435, 0, 1);
    give(p, SECCOMP_RET_ERRNO | ENOSYS);
}

/* vsock and AF_ALG ignore network namespaces; packet and exotic families only widen the kernel's surface. */
static void allow_socket_families(struct program *p) {
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 7);
    load(p, offsetof(struct seccomp_data, args[0]));
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 4, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 3, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 2, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 1, 0);
    give(p, SECCOMP_RET_ERRNO | EAFNOSUPPORT);
    give(p, SECCOMP_RET_ALLOW);
}

/* Unix sockets that must be connected to send. A datagram names where it goes in every message, behind a pointer. */
static void allow_connected_sockets(struct program *p, unsigned int call) {
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, call, 0, 8);
    load(p, offsetof(struct seccomp_data, args[0]));
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 4);
    load(p, offsetof(struct seccomp_data, args[1]));
    emit(p, BPF_ALU | BPF_AND | BPF_K, 0xf, 0, 0); /* without SOCK_CLOEXEC and SOCK_NONBLOCK */
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, SOCK_STREAM, 2, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, SOCK_SEQPACKET, 1, 0);
    give(p, SECCOMP_RET_ERRNO | EAFNOSUPPORT);
    give(p, SECCOMP_RET_ALLOW);
}

/* Without a network namespace a path can lead to any socket of the host, so connect.c decides about each connection. */
static void confine_sockets(struct program *p, bool listened) {
    allow_connected_sockets(p, SYS_socket);
    allow_connected_sockets(p, SYS_socketpair);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, SYS_connect, 0, 1);
    give(p, listened ? SECCOMP_RET_USER_NOTIF : SECCOMP_RET_ERRNO | EPERM);
}

static void deny(struct program *p, const int *calls, size_t count) {
    for (size_t i = 0; i < count; i++) {
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)calls[i], 0, 1);
        give(p, SECCOMP_RET_ERRNO | EPERM);
    }
}

/* With `listener` connections are asked about there; without, none can be made. */
const char *install_seccomp(bool allow_inet, int *listener) {
    struct program p = {.length = 0};
    load(&p, offsetof(struct seccomp_data, arch));
    emit(&p, BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0);
    give(&p, SECCOMP_RET_ERRNO | ENOSYS);
    load(&p, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
    emit(&p, BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* the x32 table would bypass every number below */
    give(&p, SECCOMP_RET_ERRNO | ENOSYS);
#endif
    deny(&p, denied, sizeof denied / sizeof *denied);
    if (!slot.namespaces && slot.run_uid <= 0) deny(&p, lasting, sizeof lasting / sizeof *lasting);
    if (allow_inet) allow_socket_families(&p);
    else confine_sockets(&p, listener != NULL);
    deny_namespaces(&p);
    give(&p, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {p.length, p.code};
    bool listened = listener && !allow_inet;
    long result = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, listened ? SECCOMP_FILTER_FLAG_NEW_LISTENER : 0, &program);
    if (result < 0) return "install the seccomp filter";
    if (listened) *listener = (int)result;
    return NULL;
}

/* What a slot may not do: capabilities, ids, limits. Given up once by the init, so a command pays nothing for it. */
#include "slot.h"

#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Enough for package managers inside the slot's own files; nothing that reaches the kernel or the network stack. */
static const int kept_capabilities[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL,
                                        CAP_SETGID, CAP_SETUID, CAP_SETFCAP, CAP_NET_BIND_SERVICE};

/* What an exec can never give back. */
static const char *limit_capabilities(uint64_t kept) {
    for (int c = 0; c <= 63; c++)
        if (!(kept >> c & 1) && prctl(PR_CAPBSET_DROP, c, 0, 0, 0) && errno != EINVAL) return "drop capabilities";
    return NULL;
}

static const char *set_capabilities(uint64_t kept) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct current[2], wanted[2] = {{0}, {0}};
    if (syscall(SYS_capget, &header, current)) return "read capabilities";
    for (int i = 0; i < 2; i++) {
        uint32_t part = (uint32_t)(kept >> (32 * i)) & current[i].permitted;
        wanted[i].effective = wanted[i].permitted = part;
    }
    if (syscall(SYS_capset, &header, wanted)) return "set capabilities";
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    return NULL;
}

static const char *set_limits(void) {
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (slot.mark > 0) {
        /* The kernel ignores this limit, every process shows it, and nobody can change it (seccomp.c): whoever cleans up
         * after a killed server finds by it what has left all else behind. */
        struct rlimit mark = {(rlim_t)slot.mark, (rlim_t)slot.mark};
        if (setrlimit(MARKED_LIMIT, &mark)) return "mark the slot's processes";
    }
    if (slot.max_processes > 0) {
        struct rlimit processes = {(rlim_t)slot.max_processes, (rlim_t)slot.max_processes};
        if (setrlimit(RLIMIT_NPROC, &processes)) return "limit processes";
    }
    if (slot.max_memory_bytes > 0) {
        struct rlimit memory = {(rlim_t)slot.max_memory_bytes, (rlim_t)slot.max_memory_bytes};
        if (setrlimit(RLIMIT_DATA, &memory)) return "limit memory";
    }
    return NULL;
}

/* One Landlock domain for the whole slot, because commands in domains of their own cannot signal each other. Only where
 * commands have a user of their own: else the domain is what keeps them from signalling their init. */
static const char *enter_landlock(void) {
    if (!slot.landlock || slot.run_uid <= 0) return NULL;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return "set no_new_privs";
    return restrict_with_landlock();
}

/* With namespaces the init itself is confined for good. Without them it keeps what it needs to control commands that
 * run under another id, and become_command() confines those. */
const char *drop_init_privileges(void) {
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (!slot.namespaces) return enter_landlock();
    uint64_t kept = 0;
    for (size_t i = 0; i < sizeof kept_capabilities / sizeof *kept_capabilities; i++)
        kept |= 1ull << kept_capabilities[i];
    const char *failed = limit_capabilities(kept);
    if (!failed) failed = set_capabilities(kept);
    if (!failed) failed = set_limits();
    if (!failed && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) failed = "set no_new_privs";
    if (!failed && slot.seccomp) failed = install_seccomp(true, NULL);
    return failed;
}

static const char *take_run_uid(void) {
    uid_t user = (uid_t)slot.run_uid;
    gid_t group = (gid_t)slot.run_gid;
    /* The saved group is for leave_group(); an exec makes it `group` as well. */
    if (setgroups(slot.n_groups, slot.groups) || syscall(SYS_setresgid, group, group, other_group(group)) ||
        syscall(SYS_setresuid, user, user, user))
        return "take the slot's user id";
    return NULL;
}

/* Last step before a command or a file worker does its work. `listener` as in install_seccomp(). */
const char *become_command(int *listener) {
    if (slot.namespaces) return slot.run_uid > 0 || slot.run_gid > 0 || slot.n_groups ? take_run_uid() : NULL;
    const char *failed = set_limits();
    if (!failed && slot.run_uid > 0) {
        failed = limit_capabilities(0);
        if (!failed) failed = take_run_uid();
        if (!failed) failed = set_capabilities(0);
    }
    if (!failed && (slot.run_uid > 0 || slot.landlock || slot.seccomp) && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        failed = "set no_new_privs";
    if (!failed && slot.landlock && slot.run_uid <= 0) failed = restrict_with_landlock();
    if (!failed && slot.seccomp) failed = install_seccomp(!slot.no_inet, listener);
    return failed;
}

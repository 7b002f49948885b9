/* Landlock: what is left when no namespace can be made. A command sees the system read-only, writes only below its
 * slot's directory, and can neither signal nor reach the abstract sockets of anything outside. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CREATE_RULESET_VERSION 1u
#define ALL_V1 ((1ull << 13) - 1)
#define REFER (1ull << 13)
#define TRUNCATE (1ull << 14)
#define IOCTL_DEV (1ull << 15)
#define READ_AND_RUN 13ull /* execute, read file, read directory */
#define SHARED_MEMORY (2 | 4 | 1 << 5 | 1 << 8 | TRUNCATE) /* write file, read file, remove file, make regular file */
#define TCP_ALL 3ull
#define SCOPE_ALL 3ull

struct ruleset {
    uint64_t handled_files, handled_network, scoped;
};

static int landlock_abi(void) {
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, CREATE_RULESET_VERSION);
    return abi < 0 ? 0 : (int)abi;
}

bool landlock_scopes_sockets(void) { return landlock_abi() >= 6; }

static uint64_t handled_files(int abi) {
    return ALL_V1 | (abi >= 2 ? REFER : 0) | (abi >= 3 ? TRUNCATE : 0) | (abi >= 5 ? IOCTL_DEV : 0);
}

static bool allow(int ruleset, const char *path, uint64_t access) {
    struct landlock_path_beneath_attr rule = {.allowed_access = access};
    rule.parent_fd = open(path, O_PATH | O_CLOEXEC);
    if (rule.parent_fd < 0) return errno == ENOENT;
    struct stat info;
    /* Rights on directories cannot be granted on a file. */
    if (fstat(rule.parent_fd, &info) == 0 && !S_ISDIR(info.st_mode))
        rule.allowed_access &= 1 | 2 | 4 | TRUNCATE | IOCTL_DEV;
    bool added = syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0;
    close(rule.parent_fd);
    return added;
}

const char *restrict_with_landlock(void) {
    static const char *const readable[] = {"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt",
                                           "/etc", "/proc", "/var/lib/dpkg", "/sys/devices/system/cpu"};
    static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom",
                                          "/dev/tty", "/dev/pts", "/dev/ptmx"};
    int abi = landlock_abi();
    uint64_t all = handled_files(abi);
    struct ruleset attributes = {all, abi >= 4 && slot.no_inet ? TCP_ALL : 0, abi >= 6 ? SCOPE_ALL : 0};
    size_t size = abi >= 6 ? 24 : abi >= 4 ? 16 : 8;
    int ruleset = (int)syscall(SYS_landlock_create_ruleset, &attributes, size, 0);
    if (ruleset < 0) return "create a Landlock ruleset";
    bool added = allow(ruleset, slot.root, all);
    for (size_t i = 0; i < sizeof readable / sizeof *readable; i++)
        added = added && allow(ruleset, readable[i], READ_AND_RUN);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        added = added && allow(ruleset, devices[i], (2 | 4 | TRUNCATE | IOCTL_DEV | 8) & all);
    /* Semaphores and shared memory have no other place. Only for slots with users of their own: others would share them.
     * The directory cannot be listed, and what a slot leaves is removed at its end. */
    if (slot.run_uid > 0) added = added && allow(ruleset, "/dev/shm", SHARED_MEMORY & all);
    if (!added) return "add a Landlock rule";
    if (syscall(SYS_landlock_restrict_self, ruleset, 0)) return "enforce Landlock";
    close(ruleset);
    return NULL;
}

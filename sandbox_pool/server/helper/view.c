/* What slots see of the host's own root, as an overlay that the zygote keeps for all lives of a slot.
 *
 * An overlay reads its layers with the rights of whoever mounted it. This one is mounted by a stranger to the host: a user
 * id that owns nothing, without the capabilities that pass over modes. So what a stranger may not read stays unreadable in
 * the slot, although id-mapping makes root's files the slot's own there.
 *
 * The layers are a folder (`view`, made by isolation/host_view.py) and the host's root. The slot's root is `view/slot`,
 * which the host's root does not have: only its subfolders that carry a redirect lead to the host. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STRANGER 65533
#define MS_RDONLY_NOSUID_NODEV (1 | 2 | 4)
#define MNT_DETACH 2

int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);

static int attach(const char *path, const char *name, int userns) {
    int tree = clone_layer(path, userns);
    if (tree < 0 || (mkdir(name, 0755) && errno != EEXIST)) return errno;
    int error = syscall(SYS_move_mount, tree, "", AT_FDCWD, name, 4 /* MOVE_MOUNT_F_EMPTY_PATH */) ? errno : 0;
    close(tree);
    return error;
}

/* setfsuid takes the capabilities away that pass over modes, and leaves the one to mount. */
static int mount_as_stranger(const char *options, const char *target) {
    pid_t pid = fork();
    if (pid == 0) {
        if (setgroups(0, NULL)) _exit(errno);
        setfsgid(STRANGER);
        setfsuid(STRANGER);
        _exit(mount("overlay", target, "overlay", MS_RDONLY_NOSUID_NODEV, options) ? errno : 0);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return errno;
    return WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
}

static int build_view(long key, int userns, const char *target) {
    char view[32], host[32], options[128];
    snprintf(view, sizeof view, "m%ld", key);
    snprintf(host, sizeof host, "h%ld", key);
    int error = attach("view", view, userns);
    if (!error) error = attach("/", host, userns);
    snprintf(options, sizeof options, "lowerdir=%s:%s,redirect_dir=follow", view, host);
    if (!error && mkdir(target, 0755) && errno != EEXIST) error = errno;
    if (!error) error = mount_as_stranger(options, target);
    umount2(view, MNT_DETACH); /* the overlay holds its layers itself */
    umount2(host, MNT_DETACH);
    return error;
}

/* The path of the view for slots whose ids begin at `key`, made when it is first asked for; NULL with errno. */
const char *host_view(const char *directory, long key, int userns) {
    static char path[4096];
    char target[32];
    snprintf(target, sizeof target, "v%ld", key);
    snprintf(path, sizeof path, "%s/%s/slot", directory, target);
    if (access(path, F_OK) == 0) return path;
    int before = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int error = before < 0 || chdir(directory) ? errno : build_view(key, userns, target);
    if (before >= 0 && fchdir(before) && !error) error = errno;
    if (before >= 0) close(before);
    errno = error;
    return error ? NULL : path;
}

/* The slot's root: an overlay whose writable layer is a size-limited tmpfs, its own /dev and /proc, and nothing of
 * the host reachable behind it. Everything is mounted in the slot's own mount namespace, so it ends with the slot. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MS_NOSUID
#define MS_RDONLY 1
#define MS_NOSUID 2
#define MS_NODEV 4
#define MS_NOEXEC 8
#define MS_REMOUNT 32
#define MS_BIND 4096
#define MS_MOVE 8192
#define MS_REC 16384
#define MS_PRIVATE (1 << 18)
#endif
#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef MNT_DETACH
#define MNT_DETACH 2
#endif

int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);

int upper_fd = -1;
size_t part_entries; /* what had to be put into the writable layer to mount on */

/* Where the writable layer is, ended by a slash; empty in a user namespace, which may have no right to what lies above
 * and needs none. gVisor takes absolute names only. */
static char here[2048];

/* A detached copy of the mount at `path`, its owners shifted into the user namespace if there is one. */
int clone_layer(const char *path, int userns_fd) {
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | O_CLOEXEC);
    if (tree < 0 || userns_fd < 0) return tree;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns_fd};
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) {
        int error = errno;
        close(tree);
        errno = error;
        return -1;
    }
    return tree;
}

static int bind_device(const char *name) {
    char from[64], to[64];
    snprintf(from, sizeof from, "/dev/%s", name);
    snprintf(to, sizeof to, "root/dev/%s", name);
    /* Apptainer's own /dev has no `full`: neither have slots there. */
    if (access(from, F_OK) && errno == ENOENT && !strcmp(name, "full")) return 0;
    int fd = open(to, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    close(fd);
    return mount(from, to, NULL, MS_BIND, NULL);
}

static const char *make_devices(void) {
    static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
    /* Folders beside the writable layer, no file systems of their own: the kernel keeps a record of each of those in every
     * memory cgroup of the machine, so that with many slots it is they that fill its memory. */
    mkdir("root/dev", 0755);
    if (mkdir("dev", 0755) || mount("dev", "root/dev", NULL, MS_BIND, NULL)) return "mount /dev";
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (bind_device(devices[i])) return "bind a device";
    mkdir("root/dev/shm", 01777);
    if (mkdir("shm", 01777) || chmod("shm", 01777) || mount("shm", "root/dev/shm", NULL, MS_BIND, NULL)) return "mount /dev/shm";
    mkdir("root/dev/pts", 0755);
    if (mount("devpts", "root/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,max=64") &&
        /* gVisor's takes no options, and is a new one with usable terminals each time. */
        (errno != EINVAL || mount("devpts", "root/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, NULL)))
        return "mount /dev/pts";
    if (symlink("pts/ptmx", "root/dev/ptmx") || symlink("/proc/self/fd", "root/dev/fd") ||
        symlink("/proc/self/fd/0", "root/dev/stdin") || symlink("/proc/self/fd/1", "root/dev/stdout") ||
        symlink("/proc/self/fd/2", "root/dev/stderr"))
        return "link /dev/fd";
    return NULL;
}

/* Sends a packet to itself. gVisor knows no way to bring loopback up, because there it is up from the start. */
static bool reaches_itself(int fd) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    char byte = 0;
    struct pollfd polled = {fd, POLLIN, 0};
    return bind(fd, (struct sockaddr *)&address, size) == 0 &&
           getsockname(fd, (struct sockaddr *)&address, &size) == 0 &&
           sendto(fd, &byte, 1, 0, (struct sockaddr *)&address, size) == 1 && poll(&polled, 1, 1000) == 1;
}

static bool loopback_up(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_flags = IFF_UP | IFF_RUNNING};
    strcpy(request.ifr_name, "lo");
    bool up = fd >= 0 && (ioctl(fd, SIOCSIFFLAGS, &request) == 0 || (errno == ENOTTY && reaches_itself(fd)));
    if (fd >= 0) close(fd);
    return up;
}

/* A container with SYS_ADMIN but without NET_ADMIN may make a network and not configure it, unless the network belongs
 * to a user namespace. A child makes one with its own; only the network is taken over from it. */
static bool borrow_network(void) {
    enum { AT = 200 };
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) {
        bool up = unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0 && loopback_up();
        int network = up ? open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC) : -1;
        _exit(network >= 0 && dup3(network, AT, O_CLOEXEC) == AT && close(network) == 0 ? 0 : 1);
    }
    int status = 1;
    if (pid < 0 || waitpid(pid, &status, __WALL) != pid || status) return false;
    bool taken = setns(AT, CLONE_NEWNET) == 0;
    close(AT);
    return taken;
}

/* Without a user namespace id 0 of the slot is the host's: what root may write in /proc must be read-only. */
static const char *protect_proc(void) {
    static const char *const read_only[] = {"sys", "sysrq-trigger", "irq", "bus", "fs"};
    static const char *const hidden[] = {"kcore", "keys", "timer_list", "sched_debug", "latency_stats"};
    char path[64];
    for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++) {
        snprintf(path, sizeof path, "root/proc/%s", read_only[i]);
        if (access(path, F_OK)) continue;
        if (mount(path, path, NULL, MS_BIND | MS_REC, NULL) ||
            mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
            return "protect /proc";
    }
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        snprintf(path, sizeof path, "root/proc/%s", hidden[i]);
        if (!access(path, F_OK) && mount("/dev/null", path, NULL, MS_BIND, NULL)) return "hide part of /proc";
    }
    return NULL;
}

enum { PAGE = 4096 };

/* The options of an overlay, with what lies here named by `prefix`; false when they do not fit a page. */
static bool name_layers(char *options, const char *prefix, const char *below, const char *last, const char *upper,
                        const char *work) {
    int used = snprintf(options, PAGE, "lowerdir=");
    const char *separator = "";
    for (int i = 0; i < slot.n_layers && used < PAGE; i++) {
        char path[2048];
        const char *before = *slot.layers[i] == '/' ? "" : prefix;
        snprintf(path, sizeof path, "%s%s%s%s", before, slot.layers[i], *below ? "/" : "", below);
        if (*below && access(path, F_OK)) continue; /* a snapshot of the working directory alone */
        used += snprintf(options + used, (size_t)(PAGE - used), "%s%s", separator, path);
        separator = ":";
    }
    if (used < PAGE && last) used += snprintf(options + used, (size_t)(PAGE - used), "%s%s", separator, last);
    if (used < PAGE)
        used += snprintf(options + used, (size_t)(PAGE - used), ",upperdir=%s%s,workdir=%s%s%s", prefix, upper, prefix,
                         work, slot.user_ns ? ",userxattr" : "");
    return used < PAGE;
}

/* Overlay of `below` in every layer (all of it when empty), topmost first, with `last` as the lowest. Where absolute
 * names are too long, relative ones are left. */
static const char *mount_overlay(const char *below, const char *last, const char *upper, const char *work,
                                 const char *target) {
    char options[PAGE];
    if (!name_layers(options, here, below, last, upper, work) && !name_layers(options, "", below, last, upper, work))
        return "name all layers";
    return mount("overlay", target, "overlay", MS_NODEV, options) ? "mount the overlay" : NULL;
}

/* An image has many layers and the kernel takes a page of options: short names for all of them. */
static const char *bind_layers(void) {
    static char names[MAX_LAYERS][8];
    for (int i = 0; i < slot.n_layers; i++) {
        snprintf(names[i], sizeof names[i], "l%d", i);
        if (mkdir(names[i], 0755) || mount(slot.layers[i], names[i], NULL, MS_BIND, NULL)) return "attach a layer";
        slot.layers[i] = names[i];
    }
    return NULL;
}

/* Layers that came as detached mounts get a name to be referred to by. */
static const char *attach_layers(const int *layer_fds, int n_fds) {
    static char names[MAX_LAYERS][8];
    if (!n_fds && slot.image) return bind_layers();
    slot.n_layers = n_fds ? n_fds : slot.n_layers;
    for (int i = 0; i < n_fds; i++) {
        snprintf(names[i], sizeof names[i], "l%d", i);
        mkdir(names[i], 0755);
        if (syscall(SYS_move_mount, layer_fds[i], "", AT_FDCWD, names[i], 4 /* MOVE_MOUNT_F_EMPTY_PATH */))
            return "attach a layer";
        slot.layers[i] = names[i];
    }
    return NULL;
}

static int make_part(char *upper) {
    char *below = strchr(upper + 2, '/');
    if (below) *below = '\0';
    if (mkdir(upper, 0755) == 0) part_entries++;
    else if (errno != EEXIST) return errno;
    if (below) *below = '/';
    return make_directories(upper, 0755);
}

/* An ordinary user may not use the host's root as a layer, because other mounts lie on it; but what lies below its
 * directories can be used. So each of them gets an overlay of its own, with its upper inside of the common one. */
static const char *mount_parts(void) {
    for (int i = 0; i < slot.n_parts; i++) {
        char host[64], upper[64], work[64], target[64];
        snprintf(host, sizeof host, "/%s", slot.parts[i]);
        snprintf(upper, sizeof upper, "u/%s", slot.parts[i]);
        snprintf(work, sizeof work, "w%d", i);
        snprintf(target, sizeof target, "root/%s", slot.parts[i]);
        if (make_part(upper) || mkdir(work, 0755)) return "make the writable layer";
        const char *failed = mount_overlay(slot.parts[i], host, upper, work, target);
        if (failed) return failed;
    }
    return NULL;
}

static bool is_folder(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* Within the slot's root, where links of the image lead to places of the image. */
static int open_in(int root, const char *path, uint64_t flags) {
    struct {
        uint64_t flags, mode, resolve;
    } how = {flags | O_CLOEXEC, flags & O_CREAT ? 0644 : 0, 0x10 /* RESOLVE_IN_ROOT */};
    return (int)syscall(437 /* openat2 */, root, path, &how, sizeof how);
}

/* The folders on the way to where a link of /etc leads, as far as they are not there. */
static void make_way(int root, const char *link) {
    char to[4096], path[sizeof to + 8];
    ssize_t size = readlinkat(root, link, to, sizeof to - 1);
    if (size <= 0) return;
    to[size] = '\0';
    snprintf(path, sizeof path, "%s%s", *to == '/' ? "" : "etc/", to + strspn(to, "/"));
    int above = open_in(root, ".", O_PATH | O_DIRECTORY);
    for (char *name = path, *end; above >= 0 && (end = strchr(name, '/')); name = end + 1) {
        *end = '\0';
        int folder = open_in(root, path, O_PATH | O_DIRECTORY);
        if (folder < 0 && mkdirat(above, name, 0755) == 0) folder = open_in(root, path, O_PATH | O_DIRECTORY);
        *end = '/';
        close(above);
        above = folder;
    }
    if (above >= 0) close(above);
}

/* A file of our own in place of one of the image, as engines do it: where a link leads nowhere, as that of systemd's
 * resolver does, it is made there. */
static const char *show_file(const char *name, const char *text) {
    char path[64], target[64];
    snprintf(path, sizeof path, "f-%s", name);
    snprintf(target, sizeof target, "etc/%s", name);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0 || !write_all(file, text, strlen(text))) return "write a file for /etc";
    close(file);
    int root = open("root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = open_in(root, target, O_PATH);
    if (fd < 0 && errno == ENOSYS) fd = openat(root, target, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        make_way(root, target);
        fd = open_in(root, target, O_WRONLY | O_CREAT);
        part_entries = count_entries(upper_fd);
    }
    close(root);
    if (fd < 0) return "show a file in /etc of the image";
    snprintf(target, sizeof target, "/proc/self/fd/%d", fd);
    const char *failed = mount(path, target, NULL, MS_BIND, NULL) ? "show a file in /etc of the image" : NULL;
    close(fd);
    return failed;
}

static const char *dress_image(void) {
    char hosts[256];
    const char *failed;
    if (!is_folder("root/dev") || !is_folder("root/proc") || !is_folder("root/sys")) {
        errno = ENOTDIR;
        return "find folders at /dev, /proc and /sys of the image";
    }
    if (mount("tmpfs", "root/sys", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=555")) return "mount /sys";
    snprintf(hosts, sizeof hosts, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t%s\n", slot.hostname);
    if ((failed = show_file("hosts", hosts))) return failed;
    return show_file("resolv.conf", slot.name_servers ? slot.name_servers : "");
}

static const char *enter_root(void) {
    if (chdir("root")) return "enter the root";
    if (syscall(SYS_pivot_root, ".", ".") == 0) {
        if (umount2(".", MNT_DETACH) || chdir("/")) return "leave the old root";
        return NULL;
    }
    /* Docker's filter refuses pivot_root even with SYS_ADMIN; without CAP_SYS_CHROOT there is no way back from this. */
    if (mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) return "pivot_root";
    return NULL;
}

/* The root is what its topmost layer says of it: whose it is, and who may enter it. */
static bool dress_upper(void) {
    struct stat info;
    return stat(slot.layers[0], &info) == 0 && fchown(upper_fd, info.st_uid, info.st_gid) == 0 &&
           fchmod(upper_fd, info.st_mode & 07777) == 0;
}

/* Runs with the zygote's run directory as working directory; relative paths need no right on what lies above it. */
const char *build_root(const int *layer_fds, int n_fds, const int *mount_fds) {
    char options[96];
    const char *failed;
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) return "make mounts private";
    snprintf(options, sizeof options, "mode=755%s%s", slot.upper_size ? ",size=" : "",
             slot.upper_size ? slot.upper_size : "");
    if (mount("tmpfs", "m", "tmpfs", MS_NOSUID | MS_NODEV, options) || chdir("m")) return "mount the writable layer";
    if (!slot.user_ns) {
        if (!getcwd(here, sizeof here - 1)) return "name the writable layer";
        strcat(here, "/");
    }
    if (mkdir("u", 0755) || mkdir("w", 0755) || mkdir("root", 0755)) return "make the writable layer";
    if ((upper_fd = open("u", O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) return "open the writable layer";
    if ((failed = attach_layers(layer_fds, n_fds))) return failed;
    if (slot.image && !dress_upper()) return "make the root as the image has it";
    if ((failed = mount_overlay("", NULL, "u", "w", "root"))) return failed;
    if ((failed = mount_parts())) return failed;
    if (slot.image && (failed = dress_image())) return failed;
    if ((failed = make_devices())) return failed;
    mkdir("root/proc", 0555);
    if (mount("proc", "root/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return "mount /proc";
    if (!slot.user_ns && (failed = protect_proc())) return failed;
    if (slot.net_ns && !loopback_up() && (slot.user_ns || !borrow_network())) return "bring up loopback";
    if (sethostname(slot.hostname, strlen(slot.hostname))) return "set the host name";
    if (slot.n_mounts && (failed = attach_mounts(mount_fds))) return failed;
    return enter_root();
}

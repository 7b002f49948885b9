/* Who an image's commands run as: `user`, `uid`, `user:group` or `uid:gid`, by the image's own /etc/passwd and /etc/group.
 * Read without the C library's name service: that of a static program asks the host's. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A number, or -1. */
static long as_number(const char *text) {
    char *end;
    long value = strtol(text, &end, 10);
    return *text && !*end && value >= 0 && value < 0xFFFFFFFFL ? value : -1;
}

enum { LARGEST = 4 << 20 };

/* NULL for what is no file of usual size: an image may have a pipe there, or a link to a device that never ends. */
static FILE *open_users(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size <= LARGEST) return fdopen(fd, "r");
    if (fd >= 0) close(fd);
    return NULL;
}

static struct passwd *find_passwd(const char *user, long id) {
    FILE *file = open_users("/etc/passwd");
    struct passwd *entry = NULL;
    while (file && (entry = fgetpwent(file)))
        if (id >= 0 ? (long)entry->pw_uid == id : !strcmp(entry->pw_name, user)) break;
    if (file) fclose(file);
    return entry;
}

static long find_group(const char *group) {
    FILE *file = open_users("/etc/group");
    long id = -1;
    for (struct group *entry; file && id < 0 && (entry = fgetgrent(file));)
        if (!strcmp(entry->gr_name, group)) id = entry->gr_gid;
    if (file) fclose(file);
    return id;
}

/* A group of the user, where the slot has its id: an ordinary user of the host may have no ids but his own. */
static void add_group(gid_t group) {
    bool has = !slot.user_ns || (slot.uid_count > 1 && (slot.high_ids || (long)group < slot.uid_count));
    if (has && slot.n_groups < MAX_GROUPS) slot.groups[slot.n_groups++] = group;
}

static void find_groups(const char *user) {
    FILE *file = open_users("/etc/group");
    for (struct group *entry; file && (entry = fgetgrent(file));)
        for (char **member = entry->gr_mem; *member; member++)
            if (!strcmp(*member, user)) add_group(entry->gr_gid);
    if (file) fclose(file);
}

/* Sets the ids of the slot, and the home unless the server named one; the user's name as well. */
const char *find_user(const char **name) {
    static char user[256];
    snprintf(user, sizeof user, "%s", slot.user && *slot.user ? slot.user : "0");
    char *group = strchr(user, ':');
    if (group) *group++ = '\0';
    long uid = *user ? as_number(user) : 0;
    struct passwd *entry = find_passwd(user, uid);
    errno = 0;
    if (!entry && uid < 0) return "find the user of the image in its /etc/passwd";
    slot.run_uid = entry ? (long)entry->pw_uid : uid;
    slot.run_gid = entry ? (long)entry->pw_gid : 0;
    if (group && *group) {
        slot.run_gid = as_number(group) >= 0 ? as_number(group) : find_group(group);
        if (slot.run_gid < 0) return "find the group of the image in its /etc/group";
    } else if (entry) find_groups(entry->pw_name);
    if (slot.run_uid > 0 || slot.run_gid > 0) add_group((gid_t)slot.run_gid);
    if (!*slot.home) slot.home = strdup(entry && *entry->pw_dir ? entry->pw_dir : "/");
    snprintf(user, sizeof user, "%s", entry ? entry->pw_name : slot.run_uid ? "" : "root");
    *name = user;
    errno = 0;
    if (slot.user_ns && !slot.high_ids && (slot.run_uid >= slot.uid_count || slot.run_gid >= slot.uid_count))
        return "become the image's user, whose id this user of the host may not use (see /etc/subuid)";
    return NULL;
}

/* Shared declarations of the slot helper: one static program that is zygote, slot init, job keeper and file worker.
 *
 *   zygote   host side; clones a slot on request, so that a slot costs no exec
 *   init     first process of a slot; forks keepers and file workers, nothing else
 *   keeper   owns one command: its shell, its output, its deadline, and every process it leaves behind
 *   worker   does one file request inside the slot, with the slot's own rights, so that no path can escape it
 */
#ifndef HERMES_SLOT_H
#define HERMES_SLOT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_FDS 200
#define MAX_LAYERS 192 /* each is passed on as a descriptor; the kernel takes 253 in one message */
#define MAX_GROUPS 64
#define MAX_CGROUPS 4
#define MAX_PARTS 16
#define MAX_MOUNTS 8

/* message.c: length-prefixed messages over SOCK_SEQPACKET, "op\0key=value\0...\0" and then raw bytes. */
struct message {
    char *data;       /* heap, NUL-terminated beyond `size` */
    size_t size;
    char *raw;        /* inside data */
    size_t raw_size;
    int fds[MAX_FDS];
    int n_fds;
};

struct writer {
    char *data;
    size_t size, capacity;
};

bool message_receive(int sock, struct message *message);
void message_free(struct message *message);
const char *message_op(const struct message *message);
const char *message_get(const struct message *message, const char *key);
const char *message_next(const struct message *message, const char *key, const char *previous);
long message_number(const struct message *message, const char *key, long otherwise);
void writer_begin(struct writer *writer, const char *op);
void writer_text(struct writer *writer, const char *key, const char *value);
void writer_number(struct writer *writer, const char *key, long long value);
void writer_raw_begin(struct writer *writer);
void writer_raw(struct writer *writer, const void *data, size_t size);
bool writer_send(struct writer *writer, int sock, const int *fds, int n_fds);
bool send_failure(int sock, const char *step, int error);

/* util.c */
bool write_all(int fd, const void *data, size_t size);
bool read_all(int fd, void *data, size_t size);
int write_text_file(const char *path, const char *text);
int make_directories(const char *path, mode_t mode);
int move_high(int fd);
void drain_signals(int fd); /* of a signalfd: what they tell is seen with waitpid */
long long now_us(void);
size_t count_entries(int directory_fd);
void set_process_name(const char *name);
extern char *command_line;
extern size_t command_line_size;

struct slot_mount {
    const char *from, *to;
    bool writable;
};

/* What a slot is made of; points into the message that asked for it. */
struct slot_config {
    const char *hostname, *workdir, *home, *root, *upper_size, *view;
    const char *user, *name_servers; /* of an image: who commands run as, and what /etc/resolv.conf says */
    const char *high_ids;            /* lines of the id map for owners beyond the range of ids */
    const char *layers[MAX_LAYERS];
    int n_layers;
    const char *parts[MAX_PARTS];
    int n_parts;
    struct slot_mount mounts[MAX_MOUNTS];
    int n_mounts;
    const char *cgroups[MAX_CGROUPS];
    int n_cgroups;
    bool namespaces, user_ns, net_ns, idmap, seccomp, landlock, no_inet, image, fork;
    long uid_base, uid_count, run_uid, run_gid;
    gid_t groups[MAX_GROUPS];
    size_t n_groups;
    long max_processes, max_memory_bytes, mark;
};

extern struct slot_config slot;

/* zygote.c */
int zygote_main(int control);

/* rootfs.c: the slot's own view of the file system */
const char *build_root(const int *layer_fds, int n_fds, const int *mount_fds);
extern int upper_fd;
extern size_t part_entries;
int clone_layer(const char *path, int userns_fd);

/* users.c */
const char *find_user(const char **name);

/* mounts.c */
int clone_mount(const struct slot_mount *wanted, int userns);
const char *attach_mounts(const int *trees);
extern size_t bound_mounts;

/* view.c */
int host_view(const char *directory, long key, int userns);

/* privileges.c, seccomp.c, landlock.c */
const char *drop_init_privileges(void);
const char *become_command(int *listener);
#define MARKED_LIMIT RLIMIT_LOCKS
const char *install_seccomp(bool allow_inet, int *listener);
const char *restrict_with_landlock(void);
bool landlock_scopes_sockets(void);

/* hidden.c: a shell that the programs it starts can neither read nor write */
gid_t other_group(gid_t group);
bool leave_group(void);
void enter_group(void);
bool offer_to_be_hidden(void);
void hide_traced(pid_t pid);

/* connect.c: connections of commands that share the host's network namespace */
void answer_connect(int listener);

/* init.c */
void init_main(int control);
int count_mounts(void);

/* keeper.c, shell.c */
void keeper_main(int sock, struct message *request);

/* The shell's descriptors and its pipes for output; shell.py has the same. */
enum { FD_WAKE = 240, FD_REPORT, FD_STATE, FD_SCRIPT, FD_INPUT, FD_OUT, PIPES = 6 };

struct job {
    int sock;
    int line;          /* where a client sends commands itself, lent by the server; -1 without */
    pid_t shell;       /* 0 once it has ended */
    int pipes[PIPES];  /* read ends of what commands write to; -1 once closed. A background process uses the first */
    int input;         /* write end of a background process's stdin, or the PTY */
    int listener;      /* where the kernel asks about connections of the command; -1 where it does not */
    int wake, waking;  /* both ends: what is still in this pipe the shell has not taken */
    int report;        /* where the shell says that a command has ended */
    pid_t reporter;    /* who may: `shell`, also when it is gone */
    int state, script, stdin_data; /* memory files shared with the shell */
    int saved;         /* the last complete state; the shell cannot reach it */
    int signals;       /* where the kernel tells of children that ended or stopped */
    bool pty, background;
};

const char *start_shell(struct job *job, const struct message *request);

/* states.c: memory files of sessions, kept by the init so that they outlive whoever wrote them */
struct states {
    int saved, from; /* of the job that is being started */
};
extern struct states states;
bool open_states(const struct message *request);
void store_state(const struct message *request);
void forget_state(const struct message *request);
void send_state(int control, const struct message *request);

/* session.c */
enum { ENDS = -1, SAVED = -2 };
struct report {
    char *directory; /* heap; NULL when there was none */
    int status;      /* ENDS: the shell is about to end, and its end is the status. SAVED: its state is written */
};
bool copy_file(int from, int to);
bool write_script(struct job *job, const struct message *request, int out, int err);
bool shell_took_command(const struct job *job);
bool read_report(struct job *job, struct report *report);
bool save_state(const struct job *job);

/* tree.c */
struct process {
    pid_t pid, parent;
    unsigned long long started;
    bool dead, below;
};
struct processes {
    struct process *list;
    size_t count;
};
struct processes processes_below(pid_t ancestor, const struct processes *spared);
int open_children(pid_t pid);
bool has_children(int children, pid_t except);
int kill_descendants(pid_t ancestor, const struct processes *spared);
int count_processes(void);

/* capture.c: head and tail of a stream, exact counts, whole log in the slot when it is longer than the cap */
struct capture {
    char *head, *tail;
    size_t head_size, head_capacity, tail_size, tail_capacity, tail_start;
    size_t max_chars;
    uint64_t total_bytes, total_chars;
    int pending;            /* continuation bytes still expected by the UTF-8 counter */
    unsigned char low, high; /* range allowed for the next continuation byte */
    bool truncated;
    int log_fd;
    char log_path[128];
};
void capture_begin(struct capture *capture, size_t max_chars, const char *log_path);
void capture_add(struct capture *capture, const char *data, size_t size);
void capture_end(struct capture *capture);
void capture_free(struct capture *capture);

struct ring {
    char *data;
    size_t capacity;
    uint64_t total;
};
void ring_add(struct ring *ring, const char *data, size_t size);

/* background.c */
extern size_t background_unsent;
void background_log(const char *data, size_t size);
void background_send_log(const struct job *job, const struct message *request);
void background_add_input(struct job *job, const struct message *request);
void background_send_input(struct job *job);

/* files.c, archive.c */
void worker_main(int sock, const struct message *request);
void pack_tree(int out, int directory, const char *name, bool layer);
int unpack_tree(int in, int directory, bool layer);
extern const char *archive_opaque;
extern uint64_t archive_max_bytes;
extern bool archive_root_opaque;
extern long archive_owner; /* who gets what is unpacked from a layer, instead of the recorded owners; -1 keeps those */

#endif

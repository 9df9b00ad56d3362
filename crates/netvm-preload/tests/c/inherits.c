/* What a child can read of its parent's memory at a lender whose memory is shared, and that it cannot any more when it has given privileges up: all that
   happens twice, with a pager whose descriptors are its own, and where that is forbidden. */
#include "check.h"
#include <dirent.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define BYTES (24 * MIB)

struct open {
    /* Files of leases; those that may be written to; faults, and memory of this process or another one. */
    int leases, writable, faults, memories;
    ino_t own;
};

/* What the pager's thread has open. */
static struct open look(void) {
    struct open found = {0};
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads);
    for (struct dirent *thread; (thread = readdir(threads));) {
        char path[300], name[300];
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", thread->d_name);
        FILE *comm = fopen(path, "r");
        int is_pager = comm && fgets(name, sizeof name, comm) && strcmp(name, "netvm-pager\n") == 0;
        if (comm) fclose(comm);
        snprintf(path, sizeof path, "/proc/self/task/%s/fd", thread->d_name);
        DIR *descriptors = is_pager ? opendir(path) : NULL;
        if (!descriptors) continue;
        for (struct dirent *one; (one = readdir(descriptors));) {
            ssize_t length = readlinkat(dirfd(descriptors), one->d_name, name, sizeof name - 1);
            if (length <= 0) continue;
            name[length] = 0;
            found.faults += strstr(name, "userfaultfd") != NULL;
            found.memories += length > 4 && strcmp(name + length - 4, "/mem") == 0;
            if (!strstr(name, "netvm-lease")) continue;
            struct stat link, file;
            CHECK(fstatat(dirfd(descriptors), one->d_name, &link, AT_SYMLINK_NOFOLLOW) == 0);
            CHECK(fstatat(dirfd(descriptors), one->d_name, &file, 0) == 0);
            found.leases++;
            if (link.st_mode & 0200) found.writable++, found.own = file.st_ino;
        }
        closedir(descriptors);
    }
    closedir(threads);
    return found;
}

/* Whether no page of another lease's file is mapped: the kernel would map others of it in its place. */
static int maps_only(ino_t own) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[600];
    int is_right = maps != NULL;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long inode = 0;
        if (strstr(line, "netvm-lease")) is_right &= sscanf(line, "%*s %*s %*s %*s %lu", &inode) == 1 && inode == own;
    }
    if (maps) fclose(maps);
    return is_right;
}

static int has(int leases, int writable) {
    struct open found = look();
    return found.leases == leases && found.writable == writable && found.faults == 1 && found.memories <= 1 && maps_only(found.own);
}

static void forbid_tables_of_threads(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_unshare, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof rules / sizeof *rules, rules};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

static void nothing(void) {}
static void no_new_privileges(void) { CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0); }
static void no_new_privileges_by_number(void) { CHECK(syscall(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0); }
static void another_group(void) { CHECK(getuid() != 0 ? setgid(getgid()) == 0 : setresgid(65534, 65534, 65534) == 0); }
static void another_user(void) {
    if (getuid() != 0) return no_new_privileges();
    CHECK(setresgid(65534, 65534, 65534) == 0 && setuid(65534) == 0);
}
static void no_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    CHECK(syscall(SYS_capset, &header, data) == 0);
}

static void (*const ways[])(void) = {nothing, no_new_privileges, no_new_privileges_by_number, another_group, another_user, no_capabilities};
#define WAYS (int)(sizeof ways / sizeof *ways)

static int ended_well(pid_t pid) {
    int status;
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void child(int way, int shared, const char *p, char *q) {
    CHECK(has(2 * shared, shared));
    CHECK(holds(p, BYTES / 2, 1));
    ways[way]();
    CHECK(has(way ? shared : 2 * shared, shared));
    CHECK(holds(p, BYTES, 1));
    fill(q, BYTES, 10 + way);
    /* What it has given up its children do not get. Of another user they may have no far memory. */
    pid_t pid = ways[way] == another_user || ways[way] == no_capabilities ? -1 : fork();
    if (pid == 0) {
        CHECK(has(way ? shared : 3 * shared, shared));
        CHECK(holds(p, BYTES, 1) && holds(q, BYTES, 10 + way));
        _exit(0);
    }
    CHECK(pid < 0 || ended_well(pid));
    CHECK(holds(p, BYTES, 1) && holds(q, BYTES, 10 + way));
}

static void parent(void) {
    char *p = anonymous(BYTES), *q = anonymous(BYTES);
    fill(p, BYTES, 1);
    int shared = look().leases > 0;
    CHECK(has(shared, shared));
    for (int way = 0; way < WAYS; way++) {
        pid_t pid = fork();
        if (pid == 0) {
            child(way, shared, p, q);
            _exit(0);
        }
        fill(q, BYTES, 20 + way);
        CHECK(ended_well(pid));
        CHECK(holds(p, BYTES, 1) && holds(q, BYTES, 20 + way) && has(shared, shared));
    }
    printf("%d\n", shared);
    fflush(stdout);
}

int main(void) {
    for (int forbidden = 0; forbidden < 2; forbidden++) {
        /* It has no far memory yet. */
        pid_t pid = fork();
        if (pid == 0) {
            if (forbidden) forbid_tables_of_threads();
            parent();
            _exit(0);
        }
        CHECK(ended_well(pid));
    }
    puts("ok");
    return 0;
}

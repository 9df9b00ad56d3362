/* What a child can read of its parent's memory at a lender whose memory is shared, and that it cannot any more when it has given privileges up. */
#include "check.h"
#include <dirent.h>
#include <sys/stat.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define BYTES (24 * MIB)

/* Files of leases that threads of this process have open, with a table of descriptors that the program has not; those to be written, too. */
static int files(int *writable) {
    int count = 0;
    *writable = 0;
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads);
    for (struct dirent *thread; (thread = readdir(threads));) {
        char path[300], name[300];
        snprintf(path, sizeof path, "/proc/self/task/%s/fd", thread->d_name);
        DIR *descriptors = atoi(thread->d_name) != getpid() ? opendir(path) : NULL;
        if (!descriptors) continue;
        for (struct dirent *one; (one = readdir(descriptors));) {
            ssize_t length = readlinkat(dirfd(descriptors), one->d_name, name, sizeof name - 1);
            if (length <= 0) continue;
            name[length] = 0;
            if (!strstr(name, "netvm-lease")) continue;
            struct stat mode;
            CHECK(fstatat(dirfd(descriptors), one->d_name, &mode, AT_SYMLINK_NOFOLLOW) == 0);
            count++;
            *writable += (mode.st_mode & 0200) != 0;
        }
        closedir(descriptors);
    }
    closedir(threads);
    return count;
}

static void nothing(void) {}
static void no_new_privileges(void) { CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0); }
static void another_user(void) {
    if (getuid() != 0) return no_new_privileges();
    CHECK(setresgid(65534, 65534, 65534) == 0 && setuid(65534) == 0);
}
static void no_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    CHECK(syscall(SYS_capset, &header, data) == 0);
}

int main(void) {
    char *p = anonymous(BYTES), *q = anonymous(BYTES);
    fill(p, BYTES, 1);
    int writable, own = files(&writable), shared = own > 0;
    CHECK(own == shared && writable == own);
    void (*ways[])(void) = {nothing, no_new_privileges, another_user, no_capabilities};
    for (int way = 0; way < 4; way++) {
        pid_t pid = fork();
        if (pid == 0) {
            CHECK(files(&writable) == 2 * shared && writable == shared);
            CHECK(holds(p, BYTES / 2, 1));
            ways[way]();
            CHECK(files(&writable) == (way ? shared : 2 * shared) && writable == shared);
            CHECK(holds(p, BYTES, 1));
            fill(q, BYTES, 10 + way);
            /* What it has given up its children do not get. */
            pid_t child = way == 2 ? -1 : fork();
            if (child == 0) {
                CHECK(files(&writable) == (way ? shared : 3 * shared) && writable == shared);
                CHECK(holds(p, BYTES, 1) && holds(q, BYTES, 10 + way));
                _exit(0);
            }
            int status = 0;
            CHECK(child < 0 || (waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0));
            CHECK(holds(p, BYTES, 1) && holds(q, BYTES, 10 + way));
            _exit(0);
        }
        int status;
        fill(q, BYTES, 20 + way);
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(holds(p, BYTES, 1) && holds(q, BYTES, 20 + way) && files(&writable) == own);
    }
    printf("%d ok\n", shared);
    return 0;
}

/* A program that keeps its capabilities when it becomes somebody else, as setpriv and some servers do, and changes groups afterwards. */
#include "check.h"
#include <grp.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define NOBODY 65534
#define BYTES (24 * MIB)

int main(int argc, char **argv) {
    (void)argv;
    if (geteuid() != 0) {
        puts("skipped (not root)");
        return 0;
    }
    char *p = malloc(BYTES);
    if (argc == 1) fill(p, BYTES, 1);
    CHECK(prctl(PR_SET_KEEPCAPS, 1) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    CHECK(syscall(SYS_capget, &header, data) == 0);
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    CHECK(syscall(SYS_capset, &header, data) == 0);
    gid_t groups[2] = {7, 8}, now[8];
    CHECK(setgroups(2, groups) == 0 && getgroups(8, now) == 2 && now[0] == 7 && now[1] == 8);
    CHECK(setegid(9) == 0 && getegid() == 9 && setregid(10, 11) == 0 && getgid() == 10 && getegid() == 11);
    CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && getgid() == NOBODY && setgid(NOBODY) == 0);
    errno = 0;
    CHECK(setgroups(2, (gid_t *)8) == -1 && errno == EFAULT);
    fill(p, BYTES, 2);
    CHECK(holds(p, BYTES, 2));
    puts("ok");
    return 0;
}

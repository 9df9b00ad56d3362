/* Forks while most pages are packed, of children that all live at once. */
#define main one_by_one
#include "packed.c"
#undef main

int main(void) {
    memory = anonymous(PAGES * PAGE);
    for (size_t page = 0; page < PAGES; page++) write_page(page, 1);
    pid_t children[CHILDREN];
    for (int i = 0; i < CHILDREN; i++) {
        CHECK((children[i] = fork()) >= 0);
        if (!children[i]) {
            usleep(500000);
            for (size_t page = 0; page < PAGES; page++) check_page(page, 1);
            _exit(0);
        }
    }
    for (int i = 0; i < CHILDREN; i++) await(children[i]);
    for (size_t page = 0; page < PAGES; page++) check_page(page, 1);
    printf("ok\n");
    return 0;
}

// SPDX-License-Identifier: GPL-2.0
/* Mistakes that the debug kernel has to notice: insmod mistakes.ko what=NAME makes one of them. */
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

static char *what = "";
module_param(what, charp, 0);

static DEFINE_MUTEX(one);
static DEFINE_MUTEX(other);
static DEFINE_SPINLOCK(spinning);

static void both(struct mutex *first, struct mutex *second)
{
	mutex_lock(first);
	mutex_lock(second);
	mutex_unlock(second);
	mutex_unlock(first);
}

static int __init mistakes_init(void)
{
	char *bytes = kzalloc(100, GFP_KERNEL);

	if (!bytes)
		return -ENOMEM;
	if (!strcmp(what, "leak"))
		return 0;
	if (!strcmp(what, "locks")) {
		/* Nobody else wants them, so nothing hangs. */
		both(&one, &other);
		both(&other, &one);
	}
	if (!strcmp(what, "sleep")) {
		spin_lock(&spinning);
		mutex_lock(&one);
		mutex_unlock(&one);
		spin_unlock(&spinning);
	}
	kfree(bytes);
	if (!strcmp(what, "freed")) {
		OPTIMIZER_HIDE_VAR(bytes);
		pr_info("%d\n", bytes[3]);
	}
	return 0;
}

static void __exit mistakes_exit(void)
{
}

module_init(mistakes_init);
module_exit(mistakes_exit);
MODULE_DESCRIPTION("Mistakes for the debug kernel to notice");
MODULE_LICENSE("GPL");

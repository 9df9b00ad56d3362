/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/netvm_mem_control and /dev/netvm_mem*: memory of a lender, or a node's
 * segment, as a character device. See docs/design/device.md.
 */
#ifndef NETVM_MEM_H
#define NETVM_MEM_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* What a session gives the device. */
#define NETVM_MEM_LENDER 1
#define NETVM_MEM_SEGMENT 2

/* Flag of an attachment: nothing is ever written. */
#define NETVM_MEM_READ_ONLY 1
/* Flag of an attachment: the session is encrypted, with the keys that come along. */
#define NETVM_MEM_ENCRYPTED 2
/*
 * Flag of an attachment: the device is detached, by force, when the file of
 * /dev/netvm_mem_control that made it is closed. One for each open file.
 */
#define NETVM_MEM_BOUND 4
/* Flag of a detachment: though it is open, and whatever is not written is lost. */
#define NETVM_MEM_FORCE 1

/* Numbers under which a peer may notify a device. */
#define NETVM_MEM_NOTIFICATIONS 64
/* The name of the segment that a peer imports to notify a device. */
#define NETVM_MEM_BOARD "netvm_mem"

/* Makes a device of a session whose hellos are done. */
struct netvm_mem_attach {
	__u32 struct_bytes;
	__u32 kind;
	__u32 flags;
	/* A connected stream socket, which is the kernel's from now on. */
	__s32 socket;
	/* What the peer's hello allows. */
	__u32 ops_max;
	__u32 window;
	/* In: bytes to borrow of a lender. Out: bytes of the device. */
	__u64 bytes;
	/* Of the segment. */
	__u8 key[16];
	/* With which the peer may notify the device; all zeros: it may not. */
	__u8 board_key[16];
	/* The segment's, or what the lender shows. Ends with a zero. */
	char name[256];
	/* For people: where the socket is connected to. Ends with a zero. */
	char peer[128];
	/* Of an encrypted session: keys, and the numbers of the next records. */
	__u8 send_key[32];
	__u8 receive_key[32];
	__u64 send_record;
	__u64 receive_record;
	/* Shown by the lender. */
	__u32 pid;
	/* Out: N of /dev/netvm_memN. */
	__u32 device;
};

struct netvm_mem_detach {
	__u32 device;
	__u32 flags;
};

struct netvm_mem_info {
	__u64 bytes;
	__u32 kind;
	__u32 flags;
	/* 0, or the error with which everything ends. */
	__s32 error;
	__u32 device;
};

/* A range of the device; 0 bytes: to its end. */
struct netvm_mem_range {
	__u64 offset;
	__u64 bytes;
};

/* A notification: value 0 counts, any other is posted. */
struct netvm_mem_notify {
	__u32 number;
	__u32 value;
};

/* What has come under a number. */
struct netvm_mem_notified {
	__u32 number;
	/* The last that was posted. */
	__u32 value;
	/* How often it came. */
	__u64 count;
};

#define NETVM_MEM_PGD 0
#define NETVM_MEM_P4D 1
#define NETVM_MEM_PUD 2
#define NETVM_MEM_PMD 3
#define NETVM_MEM_PTE 4
#define NETVM_MEM_LEVELS 5

/* Bits of netvm_mem_page.flags. */
#define NETVM_MEM_PAGE_PRESENT 1
#define NETVM_MEM_PAGE_WRITABLE 2
#define NETVM_MEM_PAGE_DIRTY 4
#define NETVM_MEM_PAGE_ACCESSED 8
/* The mapping is one of this device. */
#define NETVM_MEM_PAGE_DEVICE 16

/* How an address of the calling process is mapped. Needs CAP_SYS_ADMIN. */
struct netvm_mem_page {
	/* In. */
	__u64 address;
	/* The entries on the way, as they are in memory; 0 below the last. */
	__u64 entries[NETVM_MEM_LEVELS];
	/* Of the byte at the address; 0 when it is not present. */
	__u64 physical;
	/* Of the page, or of the hole, that the last entry maps. */
	__u64 page_bytes;
	/* Where in the device, if it is its mapping. */
	__u64 offset;
	/* How many levels this machine has: 3, 4 or 5. */
	__u32 levels;
	/* The last entry that was read, NETVM_MEM_PGD to NETVM_MEM_PTE. */
	__u32 leaf;
	__u32 flags;
	__u32 reserved;
};

#define NETVM_MEM_ATTACH _IOWR(0xd7, 1, struct netvm_mem_attach)
#define NETVM_MEM_DETACH _IOW(0xd7, 2, struct netvm_mem_detach)
#define NETVM_MEM_INFO _IOR(0xd7, 3, struct netvm_mem_info)
#define NETVM_MEM_INVALIDATE _IOW(0xd7, 4, struct netvm_mem_range)
#define NETVM_MEM_NOTIFY _IOW(0xd7, 5, struct netvm_mem_notify)
#define NETVM_MEM_NOTIFIED _IOWR(0xd7, 6, struct netvm_mem_notified)
#define NETVM_MEM_PAGE _IOWR(0xd7, 7, struct netvm_mem_page)

#endif

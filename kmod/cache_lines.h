/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One cache line, and what has to follow the last one, per architecture:
 * line_bytes(), line_clean(), line_clean_inval(), line_inval(), lines_done().
 */
#ifndef NETVM_CACHE_LINES_H
#define NETVM_CACHE_LINES_H

#include <linux/types.h>

#if defined(CONFIG_ARM64)

#include <asm/barrier.h>
#include <asm/cpufeature.h>
#include <asm/sysreg.h>

#define NETVM_HAS_INVAL true

/* The smallest line of any cache of any CPU: CTR_EL0.DminLine, in words. */
static inline unsigned long line_bytes(void)
{
	return 4UL << (read_sanitised_ftr_reg(SYS_CTR_EL0) >> 16 & 0xf);
}

static inline void line_clean_inval(unsigned long line)
{
	asm volatile("dc civac, %0" : : "r" (line) : "memory");
}

static inline void line_clean(unsigned long line)
{
	/* Early Cortex-A53 lose data when a line is only cleaned. */
	if (cpus_have_final_cap(ARM64_WORKAROUND_CLEAN_CACHE))
		line_clean_inval(line);
	else
		asm volatile("dc cvac, %0" : : "r" (line) : "memory");
}

static inline void line_inval(unsigned long line)
{
	asm volatile("dc ivac, %0" : : "r" (line) : "memory");
}

static inline void lines_done(void)
{
	dsb(sy);
}

#elif defined(CONFIG_X86_64)

#include <asm/barrier.h>
#include <asm/processor.h>
#include <asm/special_insns.h>

/* There is INVD, for all of a CPU's caches; it is of no use here. */
#define NETVM_HAS_INVAL false

static inline unsigned long line_bytes(void)
{
	return boot_cpu_data.x86_clflush_size;
}

/* CLWB; on CPUs without it CLFLUSHOPT or CLFLUSH, which drop the line too. */
static inline void line_clean(unsigned long line)
{
	clwb((void *)line);
}

/* CLFLUSHOPT; on CPUs without it CLFLUSH. */
static inline void line_clean_inval(unsigned long line)
{
	clflushopt((void *)line);
}

static inline void line_inval(unsigned long line)
{
}

static inline void lines_done(void)
{
	/* Both instructions are ordered by fences only. */
	mb();
}

#else
#error "netvm_coherency knows the caches of arm64 and x86-64 only"
#endif

#endif

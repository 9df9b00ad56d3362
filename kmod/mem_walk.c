// SPDX-License-Identifier: GPL-2.0
/* How an address of the calling process is mapped, level by level. */
#include <linux/irqflags.h>
#include <linux/mm.h>
#include <linux/pgtable.h>
#include <linux/sched.h>

#include "mem_device.h"

/* What follows the last entry that was read. */
static void leaf(struct netvm_mem_page *page, unsigned int level,
		 unsigned int shift)
{
	page->leaf = level;
	page->page_bytes = 1ULL << shift;
}

static void present(struct netvm_mem_page *page, unsigned long pfn,
		    unsigned int flags)
{
	u64 offset = page->address & (page->page_bytes - 1);

	page->physical = ((u64)pfn << PAGE_SHIFT) + offset;
	page->flags |= NETVM_MEM_PAGE_PRESENT | flags;
}

static unsigned int flags_of(bool writable, bool dirty, bool accessed)
{
	return (writable ? NETVM_MEM_PAGE_WRITABLE : 0) |
	       (dirty ? NETVM_MEM_PAGE_DIRTY : 0) |
	       (accessed ? NETVM_MEM_PAGE_ACCESSED : 0);
}

/*
 * Page tables are not freed while interrupts are off, as for those who look
 * for pages without locks (gup_fast); entries may change, so each is read once.
 */
static void walk(struct mm_struct *mm, struct netvm_mem_page *page)
{
	unsigned long address = page->address;
	pgd_t *pgdp, pgd;
	p4d_t *p4dp, p4d;
	pud_t *pudp, pud;
	pmd_t *pmdp, pmd;
	pte_t pte;

	pgdp = pgd_offset(mm, address);
	pgd = READ_ONCE(*pgdp);
	page->entries[NETVM_MEM_PGD] = pgd_val(pgd);
	leaf(page, NETVM_MEM_PGD, PGDIR_SHIFT);
	if (pgd_none(pgd) || pgd_bad(pgd))
		return;

	/* By the entries that were checked, here and below: they may be others by now. */
	p4dp = p4d_offset_lockless(pgdp, pgd, address);
	p4d = READ_ONCE(*p4dp);
	page->entries[NETVM_MEM_P4D] = p4d_val(p4d);
	leaf(page, NETVM_MEM_P4D, P4D_SHIFT);
	if (p4d_none(p4d) || p4d_bad(p4d))
		return;

	pudp = pud_offset_lockless(p4dp, p4d, address);
	pud = READ_ONCE(*pudp);
	page->entries[NETVM_MEM_PUD] = pud_val(pud);
	leaf(page, NETVM_MEM_PUD, PUD_SHIFT);
	if (pud_none(pud) || !pud_present(pud))
		return;
	if (pud_leaf(pud)) {
		present(page, pud_pfn(pud), flags_of(pud_write(pud), false, false));
		return;
	}

	pmdp = pmd_offset_lockless(pudp, pud, address);
	pmd = READ_ONCE(*pmdp);
	page->entries[NETVM_MEM_PMD] = pmd_val(pmd);
	leaf(page, NETVM_MEM_PMD, PMD_SHIFT);
	if (pmd_none(pmd) || !pmd_present(pmd))
		return;
	if (pmd_leaf(pmd)) {
		present(page, pmd_pfn(pmd),
			flags_of(pmd_write(pmd), pmd_dirty(pmd), pmd_young(pmd)));
		return;
	}
	if (pmd_bad(pmd))
		return;

	pte = READ_ONCE(*pte_offset_kernel(&pmd, address));
	page->entries[NETVM_MEM_PTE] = pte_val(pte);
	leaf(page, NETVM_MEM_PTE, PAGE_SHIFT);
	if (pte_present(pte))
		present(page, pte_pfn(pte),
			flags_of(pte_write(pte), pte_dirty(pte), pte_young(pte)));
}

static unsigned int levels_of(struct mm_struct *mm)
{
	return 5 - (mm_p4d_folded(mm) ? 1 : 0) - (mm_pud_folded(mm) ? 1 : 0);
}

int mem_walk(struct mem_device *device, struct netvm_mem_page *page)
{
	struct mm_struct *mm = current->mm;
	struct vm_area_struct *vma;
	unsigned long flags;
	u64 address = page->address;

	/* Physical addresses help who attacks the machine's memory. */
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	if (!mm || page->reserved)
		return -EINVAL;
	memset(page, 0, sizeof(*page));
	page->address = address;
	mmap_read_lock(mm);
	vma = address == (unsigned long)address ? vma_lookup(mm, address) : NULL;
	if (!vma) {
		mmap_read_unlock(mm);
		return -EFAULT;
	}
	if (vma->vm_file && vma->vm_file->f_mapping == device->inode->i_mapping) {
		page->flags |= NETVM_MEM_PAGE_DEVICE;
		page->offset = address - vma->vm_start +
			       ((u64)vma->vm_pgoff << PAGE_SHIFT);
	}
	page->levels = levels_of(mm);
	local_irq_save(flags);
	walk(mm, page);
	local_irq_restore(flags);
	mmap_read_unlock(mm);
	return 0;
}

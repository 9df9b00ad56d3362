//! XXH3 of whole pages in vectors of 32 bytes, where the processor has them.
//!
//! The crate that computes it elsewhere chooses its vectors when it is compiled, and may assume 16 bytes only. The algorithm is that
//! of Collet's `xxhash.h` 0.8 for long inputs with a secret, unrolled for 4096 bytes; the result is the same.

/// Bytes of the secret.
pub const SECRET_BYTES: usize = 192;
const PAGE_BYTES: usize = crate::uffd::PAGE_BYTES;

/// XXH3, 64 bits, of a page; `None` where the processor is no faster at it than any other code.
#[inline]
pub fn xxh3(page: &[u8; PAGE_BYTES], secret: &[u8; SECRET_BYTES]) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2 (checked just above); the function has no other demand.
        return Some(unsafe { avx2::xxh3(page, secret) });
    }
    let _ = (page, secret);
    None
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{PAGE_BYTES, SECRET_BYTES};
    use std::arch::x86_64::*;

    const PRIME32_1: u64 = 0x9E37_79B1;
    const PRIME32_2: u64 = 0x85EB_CA77;
    const PRIME32_3: u64 = 0xC2B2_AE3D;
    const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
    const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
    const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
    const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
    const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
    const AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

    const STRIPE: usize = 64;
    const STEP: usize = 8;
    /// Stripes for which the secret lasts.
    const BLOCK_STRIPES: usize = (SECRET_BYTES - STRIPE) / STEP;
    const BLOCK: usize = BLOCK_STRIPES * STRIPE;
    /// The last stripe has a place of its own in the secret.
    const LAST_AT: usize = SECRET_BYTES - STRIPE - 7;
    const MERGE_AT: usize = 11;

    /// The 64 bytes at `at`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn stripe(bytes: &[u8], at: usize) -> [__m256i; 2] {
        let bytes: &[u8; STRIPE] = bytes[at..].first_chunk().expect("a stripe");
        // SAFETY: loads of 32 bytes, which need not be aligned, from both halves of an array of 64.
        unsafe {
            [_mm256_loadu_si256(bytes.as_ptr().cast()), _mm256_loadu_si256(bytes[32..].as_ptr().cast())]
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn accumulate(sums: &mut [__m256i; 2], data: [__m256i; 2], secret: [__m256i; 2]) {
        for half in 0..2 {
            let keyed = _mm256_xor_si256(data[half], secret[half]);
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data[half]);
            sums[half] = _mm256_add_epi64(product, _mm256_add_epi64(sums[half], swapped));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble(sums: &mut [__m256i; 2], secret: [__m256i; 2]) {
        let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
        for half in 0..2 {
            let folded = _mm256_xor_si256(sums[half], _mm256_srli_epi64::<47>(sums[half]));
            let keyed = _mm256_xor_si256(folded, secret[half]);
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(keyed), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), _mm256_slli_epi64::<32>(high));
        }
    }

    fn word(secret: &[u8; SECRET_BYTES], at: usize) -> u64 {
        u64::from_le_bytes(*secret[at..].first_chunk().expect("a word"))
    }

    fn fold(a: u64, b: u64) -> u64 {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn xxh3(page: &[u8; PAGE_BYTES], secret: &[u8; SECRET_BYTES]) -> u64 {
        let start = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];
        let of = |words: &[u64]| {
            _mm256_setr_epi64x(words[0] as i64, words[1] as i64, words[2] as i64, words[3] as i64)
        };
        let mut sums = [of(&start[..4]), of(&start[4..])];
        for (index, block) in page.chunks_exact(BLOCK).enumerate() {
            let is_last = (index + 1) * BLOCK == PAGE_BYTES;
            let stripes = if is_last { BLOCK_STRIPES - 1 } else { BLOCK_STRIPES };
            for number in 0..stripes {
                accumulate(&mut sums, stripe(block, number * STRIPE), stripe(secret, number * STEP));
            }
            if !is_last {
                scramble(&mut sums, stripe(secret, SECRET_BYTES - STRIPE));
            }
        }
        accumulate(&mut sums, stripe(page, PAGE_BYTES - STRIPE), stripe(secret, LAST_AT));
        let quarter = |half: __m256i| {
            [
                _mm256_extract_epi64::<0>(half) as u64,
                _mm256_extract_epi64::<1>(half) as u64,
                _mm256_extract_epi64::<2>(half) as u64,
                _mm256_extract_epi64::<3>(half) as u64,
            ]
        };
        let mut result = (PAGE_BYTES as u64).wrapping_mul(PRIME64_1);
        for (half, &sum) in sums.iter().enumerate() {
            let words = quarter(sum);
            for pair in 0..2 {
                let at = MERGE_AT + half * 32 + pair * 16;
                let (a, b) = (words[pair * 2] ^ word(secret, at), words[pair * 2 + 1] ^ word(secret, at + 8));
                result = result.wrapping_add(fold(a, b));
            }
        }
        result ^= result >> 37;
        result = result.wrapping_mul(AVALANCHE);
        result ^ result >> 32
    }
}

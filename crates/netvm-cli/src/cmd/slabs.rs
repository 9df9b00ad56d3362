//! Slabs of several lenders.

use crate::size::Size;

/// How large the smallest slabs of the lenders are: of larger ones no more is used, which the user is told.
pub fn smallest(lenders: &[String], slabs: &[Size]) -> Option<Size> {
    let (smallest, of) = slabs.iter().zip(lenders).min()?;
    if let Some((larger, lender)) = slabs.iter().zip(lenders).find(|(slab, _)| *slab > smallest) {
        tell!(
            "netvm: {lender} lends slabs of {larger}, {of} of {smallest}: of each slab no more is used than the smallest has; start all with one --slab"
        );
    }
    Some(*smallest)
}

//! Joins two tables by hash, in less local memory than either of them needs: what does not fit lies on lenders.
//!
//! ```text
//! netvm lend --size 2G &
//! far_join 127.0.0.1:7070 [ORDERS] [LOCAL_MIB]       orders to join with a tenth as many customers; 2000000 and 16 if not given
//! ```

use hashbrown::{DefaultHashBuilder, HashMap};
use netvm::far::{FarAlloc, FarMemory, FarVec};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// What a customer has ordered, found by number.
type Totals = HashMap<u64, Total, DefaultHashBuilder, FarAlloc>;

#[derive(Clone, Copy)]
struct Order {
    customer: u64,
    cents: u64,
    /// What else there is to an order.
    rest: [u64; 6],
}

#[derive(Clone, Copy, Default)]
struct Total {
    orders: u64,
    cents: u64,
    rest: [u64; 6],
}

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let lender = args.first().ok_or("usage: far_join LENDER [ORDERS] [LOCAL_MIB]")?;
    let orders = args.get(1).map_or(Ok(2_000_000), |count| count.parse())?;
    let local_mib: u64 = args.get(2).map_or(Ok(16), |mib| mib.parse())?;
    let far = FarMemory::builder().local(local_mib << 20).lender(lender).start()?;

    let orders = make(&far, orders);
    // Read once, from the first to the last: what comes next is fetched ahead. The table of customers is hit here and there.
    far.sequential(&orders);
    let mut totals: Totals = HashMap::with_capacity_in(orders.len() / 10, far.alloc());
    for order in &orders {
        let total = totals.entry(order.customer).or_default();
        total.orders += 1;
        total.cents += order.cents;
        total.rest[0] ^= order.rest[0];
    }

    let cents: u64 = totals.values().map(|total| total.cents).sum();
    let expected: u64 = (0..orders.len() as u64).map(cents_of).sum();
    assert_eq!(cents, expected, "a total is wrong");
    let counted: u64 = totals.values().map(|total| total.orders).sum();
    assert_eq!(counted, orders.len() as u64);
    let stats = far.stats();
    println!(
        "{} orders of {} customers, {} MiB in {} MiB: {} pages came from the lender, {} ahead of their use",
        orders.len(),
        totals.len(),
        stats.far_pages >> 8,
        stats.local_frames_peak >> 8,
        stats.remote_reads,
        stats.prefetched
    );
    Ok(())
}

fn make(far: &FarMemory, count: u64) -> FarVec<Order> {
    let mut orders = far.vec();
    for number in 0..count {
        let customer = mixed(number) % (count / 10).max(1);
        orders.push(Order { customer, cents: cents_of(number), rest: [mixed(number + count); 6] });
    }
    orders
}

fn cents_of(number: u64) -> u64 {
    mixed(number ^ 0xC0FFEE) % 100_000
}

/// SplitMix64.
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

//! What the header says and this crate must mean as well: sizes, offsets and numbers, as C writes them. The tests compare them.

use std::mem::{offset_of, size_of};

use netvm_core::limits;

use crate::code::Code;
use crate::{
    Buffer, ConnectOptions, Counts, FarCounts, LenderState, NodeOptions, PagerOptions, Piece, Place,
    PostOptions, Received, RegionInfo, Signal, Stat, copy, memory, node, pager, posted, region, sync,
};

/// Expressions of C and their values.
pub fn all() -> Vec<(String, i128)> {
    let plain: Vec<(&str, usize)> = vec![
        ("sizeof(netvm_node_options)", size_of::<NodeOptions>()),
        ("offsetof(netvm_node_options, secret_file)", offset_of!(NodeOptions, secret_file)),
        ("offsetof(netvm_node_options, secret)", offset_of!(NodeOptions, secret)),
        ("offsetof(netvm_node_options, encryption)", offset_of!(NodeOptions, encryption)),
        ("offsetof(netvm_node_options, insecure)", offset_of!(NodeOptions, insecure)),
        ("sizeof(netvm_connect_options)", size_of::<ConnectOptions>()),
        ("offsetof(netvm_connect_options, rails)", offset_of!(ConnectOptions, rails)),
        ("offsetof(netvm_connect_options, link)", offset_of!(ConnectOptions, link)),
        ("offsetof(netvm_connect_options, reconnect)", offset_of!(ConnectOptions, reconnect)),
        ("offsetof(netvm_connect_options, reserved)", offset_of!(ConnectOptions, reserved)),
        ("offsetof(netvm_connect_options, first_pause_ns)", offset_of!(ConnectOptions, first_pause_ns)),
        ("offsetof(netvm_connect_options, longest_pause_ns)", offset_of!(ConnectOptions, longest_pause_ns)),
        ("offsetof(netvm_connect_options, patience_ns)", offset_of!(ConnectOptions, patience_ns)),
        ("sizeof(netvm_region_info)", size_of::<RegionInfo>()),
        ("offsetof(netvm_region_info, rights)", offset_of!(RegionInfo, rights)),
        ("offsetof(netvm_region_info, notifications)", offset_of!(RegionInfo, notifications)),
        ("offsetof(netvm_region_info, link)", offset_of!(RegionInfo, link)),
        ("sizeof(((netvm_region_info *)0)->link)", region::LINK_BYTES),
        ("sizeof(netvm_iov)", size_of::<Piece>()),
        ("offsetof(netvm_iov, buffer)", offset_of!(Piece, buffer)),
        ("offsetof(netvm_iov, bytes)", offset_of!(Piece, bytes)),
        ("sizeof(netvm_signal)", size_of::<Signal>()),
        ("offsetof(netvm_signal, value)", offset_of!(Signal, value)),
        ("sizeof(netvm_post_options)", size_of::<PostOptions>()),
        ("offsetof(netvm_post_options, counter)", offset_of!(PostOptions, counter)),
        ("offsetof(netvm_post_options, signal)", offset_of!(PostOptions, signal)),
        ("offsetof(netvm_post_options, flags)", offset_of!(PostOptions, flags)),
        ("offsetof(netvm_post_options, reserved)", offset_of!(PostOptions, reserved)),
        ("sizeof(netvm_counts)", size_of::<Counts>()),
        ("offsetof(netvm_counts, done)", offset_of!(Counts, done)),
        ("offsetof(netvm_counts, failed)", offset_of!(Counts, failed)),
        ("sizeof(netvm_key)", size_of::<[u8; 16]>()),
        ("NETVM_NAME_BYTES_MAX", limits::NAME_BYTES_MAX),
        ("NETVM_NOTIFICATIONS_MAX", limits::NOTIFICATIONS_MAX as usize),
        ("NETVM_RAILS_MAX", limits::RAILS_MAX),
        ("NETVM_SECRET_BYTES", size_of::<[u8; 32]>()),
        ("NETVM_KEY_TEXT_BYTES", node::KEY_TEXT_BYTES),
        ("NETVM_CONDITIONS_MAX", limits::CONDITIONS_MAX),
        ("NETVM_PARTIES_MAX", limits::PARTIES_MAX as usize),
        ("NETVM_REDUCE_MAX", limits::GROUP_BYTES_MAX / 8),
        ("NETVM_BROADCAST_BYTES_MAX", limits::GROUP_BYTES_MAX),
        ("NETVM_FENCE", region::FENCE as usize),
        ("NETVM_QUEUE", region::QUEUE as usize),
        ("NETVM_HUGE", memory::HUGE as usize),
        ("NETVM_HUGE_ONLY", memory::HUGE_ONLY as usize),
        ("NETVM_PRIVATE", memory::PRIVATE as usize),
        ("NETVM_QUEUE_PLACES_MAX", limits::QUEUE_PLACES_MAX as usize),
        ("sizeof(netvm_location)", size_of::<Place>()),
        ("offsetof(netvm_location, name)", offset_of!(Place, name)),
        ("NETVM_SENDERS_MAX", limits::SENDERS_MAX as usize),
        ("NETVM_CHANNEL_BYTES_MIN", limits::CHANNEL_BYTES_MIN as usize),
        ("NETVM_CHANNEL_BYTES_MAX", limits::CHANNEL_BYTES_MAX as usize),
        ("sizeof(netvm_message)", size_of::<Received>()),
        ("offsetof(netvm_message, bytes)", offset_of!(Received, bytes)),
        ("offsetof(netvm_message, length)", offset_of!(Received, length)),
        ("offsetof(netvm_message, sender)", offset_of!(Received, sender)),
        ("offsetof(netvm_message, reserved)", offset_of!(Received, reserved)),
        ("sizeof(netvm_buffer)", size_of::<Buffer>()),
        ("offsetof(netvm_buffer, bytes)", offset_of!(Buffer, bytes)),
        ("offsetof(netvm_buffer, length)", offset_of!(Buffer, length)),
        ("sizeof(netvm_pager_options)", size_of::<PagerOptions>()),
        ("offsetof(netvm_pager_options, lenders)", offset_of!(PagerOptions, lenders)),
        ("offsetof(netvm_pager_options, lender_count)", offset_of!(PagerOptions, lender_count)),
        ("offsetof(netvm_pager_options, local_bytes)", offset_of!(PagerOptions, local_bytes)),
        ("offsetof(netvm_pager_options, area_bytes)", offset_of!(PagerOptions, area_bytes)),
        ("offsetof(netvm_pager_options, secret_file)", offset_of!(PagerOptions, secret_file)),
        ("offsetof(netvm_pager_options, secret)", offset_of!(PagerOptions, secret)),
        ("offsetof(netvm_pager_options, encryption)", offset_of!(PagerOptions, encryption)),
        ("offsetof(netvm_pager_options, replicas)", offset_of!(PagerOptions, replicas)),
        ("offsetof(netvm_pager_options, local_bytes_max)", offset_of!(PagerOptions, local_bytes_max)),
        ("offsetof(netvm_pager_options, encrypt_pages)", offset_of!(PagerOptions, encrypt_pages)),
        ("offsetof(netvm_pager_options, erasure)", offset_of!(PagerOptions, erasure)),
        ("offsetof(netvm_pager_options, learn_file)", offset_of!(PagerOptions, learn_file)),
        ("offsetof(netvm_pager_options, fault_path)", offset_of!(PagerOptions, fault_path)),
        ("offsetof(netvm_pager_options, page_bytes)", offset_of!(PagerOptions, page_bytes)),
        ("offsetof(netvm_pager_options, tier)", offset_of!(PagerOptions, tier)),
        ("offsetof(netvm_pager_options, shards)", offset_of!(PagerOptions, shards)),
        ("offsetof(netvm_pager_options, lender_timeout_ns)", offset_of!(PagerOptions, lender_timeout_ns)),
        ("offsetof(netvm_pager_options, name)", offset_of!(PagerOptions, name)),
        ("offsetof(netvm_pager_options, link)", offset_of!(PagerOptions, link)),
        ("offsetof(netvm_pager_options, pinned)", offset_of!(PagerOptions, pinned)),
        ("offsetof(netvm_pager_options, cpu)", offset_of!(PagerOptions, cpu)),
        ("offsetof(netvm_pager_options, reserved)", offset_of!(PagerOptions, reserved)),
        ("sizeof(netvm_far_counts)", size_of::<FarCounts>()),
        ("offsetof(netvm_far_counts, pages_in)", offset_of!(FarCounts, pages_in)),
        ("offsetof(netvm_far_counts, pages_out)", offset_of!(FarCounts, pages_out)),
        ("offsetof(netvm_far_counts, far_bytes)", offset_of!(FarCounts, far_bytes)),
        ("offsetof(netvm_far_counts, local_bytes)", offset_of!(FarCounts, local_bytes)),
        ("offsetof(netvm_far_counts, local_bytes_peak)", offset_of!(FarCounts, local_bytes_peak)),
        ("offsetof(netvm_far_counts, pages_moved)", offset_of!(FarCounts, pages_moved)),
        ("offsetof(netvm_far_counts, lenders_lost)", offset_of!(FarCounts, lenders_lost)),
        ("sizeof(netvm_stat)", size_of::<Stat>()),
        ("offsetof(netvm_stat, help)", offset_of!(Stat, help)),
        ("offsetof(netvm_stat, value)", offset_of!(Stat, value)),
        ("offsetof(netvm_stat, gauge)", offset_of!(Stat, gauge)),
        ("offsetof(netvm_stat, reserved)", offset_of!(Stat, reserved)),
        ("sizeof(netvm_lender_state)", size_of::<LenderState>()),
        ("offsetof(netvm_lender_state, why_lost)", offset_of!(LenderState, why_lost)),
        ("offsetof(netvm_lender_state, held_bytes)", offset_of!(LenderState, held_bytes)),
        ("offsetof(netvm_lender_state, read_bytes)", offset_of!(LenderState, read_bytes)),
        ("offsetof(netvm_lender_state, written_bytes)", offset_of!(LenderState, written_bytes)),
        ("offsetof(netvm_lender_state, reads)", offset_of!(LenderState, reads)),
        ("offsetof(netvm_lender_state, reads_ns)", offset_of!(LenderState, reads_ns)),
        ("offsetof(netvm_lender_state, lost)", offset_of!(LenderState, lost)),
        ("offsetof(netvm_lender_state, reserved)", offset_of!(LenderState, reserved)),
        ("NETVM_FAR_NORMAL", pager::NORMAL as usize),
        ("NETVM_FAR_SEQUENTIAL", pager::SEQUENTIAL as usize),
        ("NETVM_FAR_RANDOM", pager::RANDOM as usize),
        ("NETVM_FAR_WILL_NEED", pager::WILL_NEED as usize),
        ("NETVM_FAR_WONT_NEED", pager::WONT_NEED as usize),
        ("NETVM_FAR_DISCARD", pager::DISCARD as usize),
        ("NETVM_DONT_WAIT", posted::DONT_WAIT as usize),
        ("NETVM_MORE", posted::MORE as usize),
        ("NETVM_POST_BYTES_MAX", region::PART_BYTES),
        ("NETVM_CONFIRM", sync::CONFIRM as usize),
    ];
    let mut all: Vec<_> = plain.into_iter().map(|(name, value)| (name.to_owned(), value as i128)).collect();
    numbers(&mut all, &node::ENCRYPTIONS);
    numbers(&mut all, &node::RIGHTS);
    numbers(&mut all, &node::LINKS);
    numbers(&mut all, &pager::FAULT_PATHS);
    numbers(&mut all, &pager::TIERS);
    numbers(&mut all, &sync::REDUCTIONS);
    numbers(&mut all, &posted::CHANGES);
    numbers(&mut all, &copy::WAYS);
    numbers(&mut all, &copy::COPIES);
    all.extend(Code::ALL.iter().map(|(code, name)| ((*name).to_owned(), *code as i128)));
    all
}

fn numbers<N: Copy + Into<i128>, T>(all: &mut Vec<(String, i128)>, table: &[(&str, N, T)]) {
    all.extend(table.iter().map(|(name, number, _)| ((*name).to_owned(), (*number).into())));
}

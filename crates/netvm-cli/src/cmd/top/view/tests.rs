//! What is on small terminals.

use super::*;
use netvm::detail::PagerDetail;
use netvm::lender::Class;
use netvm::runfile::{RunFile, RunParams};
use netvm::stats::PagerStats;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

/// A run between two looks.
fn watched(name: &str) -> Watched {
    let path = std::env::temp_dir().join(format!("netvm-view-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let params = RunParams {
        budget_bytes: 1 << 30,
        lenders: vec!["unix:/run/some/where/netvm/one".into(), "192.168.100.200:7070".into()],
        names: vec!["unix:/run/some/where/netvm/one".into(), "file in /var/tmp".into()],
        command: "python3 job.py".into(),
        replicas: 2,
        ..RunParams::default()
    };
    let file = RunFile::create(&path, &params).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_class(0, Class::Nearby);
    file.set_class(1, Class::File);
    let slot = file.join(std::process::id()).unwrap();
    let mut watched = Watched::new(Run::new(4_194_303, file));
    let stats = PagerStats {
        faults: 123_456,
        faults_without_io: 98_765,
        remote_reads: 98_765,
        unpacked: 87_654,
        zero_fills: 65_432,
        rescues: 54_321,
        bytes_in: 123_400_000,
        bytes_out: 98_700_000,
        prefetched: 100,
        prefetch_hits: 93,
        far_pages: 3 << 18,
        local_frames: 1 << 18,
        ..PagerStats::default()
    };
    let mut detail = PagerDetail::default();
    for octave in 10..26 {
        (0..1 + 30 * u32::from(octave == 16)).for_each(|_| detail.reads.note(1 << octave));
    }
    detail.lenders[0] = (123_400_000, 98_700_000);
    detail.lender_held = [0; netvm::detail::LENDERS_COUNTED];
    (detail.lender_held[0], detail.lender_held[1]) = (2 << 30, 3 << 29);
    slot.publish(&stats, &detail);
    watched.look.at -= Duration::from_secs(1);
    watched.look_again();
    watched
}

fn drawn(width: u16, height: u16) -> Vec<String> {
    let watched = [watched(&format!("{width}x{height}"))];
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let mut chosen = TableState::new().with_selected(0);
    terminal.draw(|frame| draw(frame, &watched, &mut chosen)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(line).collect()
}

#[test]
fn what_matters_is_on_80_columns_and_24_lines() {
    let lines = drawn(80, 24);
    let all = lines.join("\n");
    println!("{all}");
    let has = |words: &[&str]| {
        let found = lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(found, "{words:?} is not in a line of\n{all}");
    };
    has(&["run", "program", "faults/s", "far", "local"]);
    // Rates are by the clock, and a little lower where others have the CPU.
    has(&["4194303", "python3 job.py", " 12", "3 GiB", "1 GiB of 1 GiB"]);
    has(&["fetched, ", "unpacked, ", "new, ", "still there"]);
    has(&["93 % of what was read ahead was used, 75 % of reads before faults"]);
    has(&["reads     half within", "all within"]);
    has(&["lent      2 GiB nearby, 1.5 GiB file"]);
    has(&["fetched/s, max ", "unpacked/s, max ", "moved, max 2", " MB/s ─"]);
    has(&["lender ", "in ", "out "]);
    has(&["where/netvm/one", " 12", " 9"]);
    has(&["file in /var/tmp", "0.0 MB/s"]);
    has(&["<131us"]);
    assert!(all.contains('█'), "no bars in\n{all}");
}

#[test]
fn a_large_terminal_has_everything() {
    let all = drawn(160, 50).join("\n");
    println!("{all}");
    for word in ["wait", "out", "unix:/run/some/where/netvm/one", "1.5 GiB", "process"] {
        assert!(all.contains(word), "no {word} in\n{all}");
    }
}

#[test]
fn no_size_is_too_small() {
    for (width, height) in [(1, 1), (20, 5), (40, 12), (80, 10)] {
        drawn(width, height);
    }
}

#[test]
fn bars_that_have_no_place_count_in_the_outer_ones() {
    let mut times = Times::default();
    for octave in 10..26 {
        (0..=u32::from(octave == 16) * 30).for_each(|_| times.note(1 << octave));
    }
    let bars = octaves(&times, 4);
    assert_eq!((bars.len(), bars.iter().map(|bar| bar.1).sum::<u64>()), (4, 46));
    assert!(bars[0].0.starts_with('<') && bars[3].0.starts_with('>'), "{bars:?}");
    assert_eq!(octaves(&times, 40).len(), 16);
    assert_eq!(octaves(&Times::default(), 4).len(), 1);
}

use super::*;
use crate::mapping::Mapping;

/// Whether this process may use maps and programs; says why not.
fn may() -> bool {
    match Pages::new(1) {
        Ok(_) => true,
        Err(error) => {
            println!("skipped (no eBPF for this user: {error})");
            false
        }
    }
}

/// Answers with the first byte of the page that the packet's first byte is the key of; else the packet goes on.
fn program<'a>(table: &'a Table, counts: &'a Pages) -> Code<'a> {
    let mut code = Code::new();
    let pass = code.label();
    code.load(Width::B4, R(2), R(1), 76);
    code.load(Width::B4, R(3), R(1), 80);
    code.copy(R(4), R(2));
    code.add(R(4), 20);
    code.jump_if_register(R(4), If::Gt, R(3), pass);
    code.load(Width::B1, R(5), R(2), 0);
    code.store(Width::B4, R(10), -4, R(5));
    code.table(R(1), table);
    code.copy(R(2), R(10));
    code.add(R(2), -4);
    code.call(Helper::Lookup);
    code.jump_if(R(0), If::Eq, 0, pass);
    code.set(R(5), 0);
    code.store(Width::B4, R(10), -4, R(5));
    code.copy(R(1), R(0));
    code.copy(R(2), R(10));
    code.add(R(2), -4);
    code.call(Helper::Lookup);
    code.jump_if(R(0), If::Eq, 0, pass);
    code.load(Width::B1, R(6), R(0), 0);
    code.pages(R(1), counts);
    code.copy(R(2), R(10));
    code.add(R(2), -4);
    code.call(Helper::Lookup);
    code.jump_if(R(0), If::Eq, 0, pass);
    code.set(R(1), 5);
    code.add_atomically(R(0), 8, R(1));
    code.copy(R(0), R(6));
    code.end();
    code.place(pass);
    code.set(R(0), verdict::NEXT);
    code.end();
    code
}

#[test]
fn programs_see_what_is_in_pages_and_tables_at_the_time() {
    if !may() {
        return;
    }
    let (table, counts) = (Table::new(4, 100).unwrap(), Pages::new(1).unwrap());
    let program = Program::load(c"netvm_test", &program(&table, &counts)).unwrap();
    let run = |key: u8| program.test(&[&[key][..], &[0; 40]].concat(), 100).unwrap().0;
    let memory = Mapping::anonymous(4 << 12).unwrap();
    memory.shared().fill(9);
    let pages: Vec<_> = (0..3).map(|_| Pages::new(1).unwrap()).collect();
    let fill = |byte| {
        move |shared: crate::shared::SharedSlice| {
            shared.fill(byte);
            Ok(())
        }
    };
    for (index, pages) in pages.iter().enumerate() {
        memory.replace_with_pages(index as u64 * 4096, pages, fill(index as u8 + 20)).unwrap();
    }
    let at = |at: usize| memory.shared().sub(at << 12, 1).unwrap();
    assert_eq!([0, 1, 2, 3].map(|page| at(page).to_vec()[0]), [20, 21, 22, 9]);
    assert_eq!(run(7), verdict::NEXT);
    let keys = [7u32, 8, 9].map(u32::to_ne_bytes);
    table.insert(keys.iter().map(|key| &key[..]).zip(&pages)).unwrap();
    assert_eq!([7, 8, 9, 10].map(run), [20, 21, 22, verdict::NEXT]);
    at(1).fill(77);
    assert_eq!(run(8), 77, "what the process writes is there at once");
    let gone = [6u32, 7, 8, 8, 5].map(u32::to_ne_bytes);
    table.remove(gone.iter().map(|key| &key[..]));
    assert_eq!([7, 8, 9].map(run), [verdict::NEXT, verdict::NEXT, 22]);
    // The maps have gone, but for those that are mapped.
    drop(pages);
    assert_eq!((run(9), at(1).to_vec()), (22, vec![77]));
    let counted = Mapping::anonymous(4096).unwrap();
    counted.replace_with_pages(0, &counts, |_| Ok(())).unwrap();
    assert_eq!(
        counted.shared().with_u64(8, |count| count.load(std::sync::atomic::Ordering::Relaxed)),
        Some(6 * 5)
    );
}

#[test]
fn tables_have_an_end_and_mappings_bounds() {
    if !may() {
        return;
    }
    let (table, pages) = (Table::new(4, 3).unwrap(), Pages::new(2).unwrap());
    let keys = [1u32, 2, 3, 4].map(u32::to_ne_bytes);
    let (done, error) = table.insert(keys.iter().map(|key| (&key[..], &pages))).unwrap_err();
    assert_eq!((done, error.raw_os_error()), (3, Some(libc::E2BIG)));
    table.insert(std::iter::empty()).unwrap();
    let memory = Mapping::anonymous(2 << 12).unwrap();
    memory.shared().fill(3);
    for offset in [4096, 100, !4095] {
        let error = memory.replace_with_pages(offset, &pages, |_| Ok(())).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{offset}");
    }
    let failed = memory.replace_with_pages(0, &pages, |_| Err(io::ErrorKind::Other.into()));
    assert!(failed.is_err() && memory.shared().to_vec() == vec![3; 2 << 12]);
    memory.replace_with_pages(0, &pages, |_| Ok(())).unwrap();
    assert_eq!(memory.shared().to_vec(), vec![0; 2 << 12]);
}

#[test]
fn a_program_that_is_refused_tells_why() {
    if !may() {
        return;
    }
    let mut code = Code::new();
    code.load(Width::B8, R(0), R(3), 0);
    code.end();
    let error = Program::load(c"netvm_bad", &code).unwrap_err();
    assert!(error.to_string().contains("R3"), "{error}");
    let mut code = Code::new();
    code.set(R(0), 0);
    code.end();
    let program = Program::load(c"netvm_good", &code).unwrap();
    assert_eq!(program.test(&[0; 64], 100).unwrap(), (0, vec![0; 64]));
    assert!(program.attach(u32::MAX / 2).is_err());
}

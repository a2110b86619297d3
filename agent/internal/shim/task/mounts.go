package task

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
)

// mounts are what sandbox-init attaches, in the order of its Setup. They are attached nowhere before that.
type mounts struct {
	// files has the root of slots and the mounts of the plan, without that of a network namespace.
	files []*os.File
	// shared are those whose owners are the host's: a user namespace has to map them.
	shared []sharedMount
	// inNetwork makes the mount of a network namespace, which is the last one of the plan; nil for none.
	inNetwork func() (*os.File, error)
}

// sharedMount is a mount of files of the host.
type sharedMount struct {
	file     *os.File
	readOnly bool
}

// openMounts makes the mounts of a container.
func openMounts(p *plan.Plan) (m *mounts, err error) {
	m = &mounts{}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	for _, one := range append([]plan.Mount{{Source: p.Root, Attributes: unix.MOUNT_ATTR_RDONLY}}, p.Mounts...) {
		switch one.Type {
		case plan.Sysfs:
			m.inNetwork = func() (*os.File, error) { return newMount("sysfs", "", one.Attributes) }
			continue
		case plan.Devices:
			f, err := devices(one, int(p.FirstID))
			if err != nil {
				return m, err
			}
			m.files = append(m.files, f)
			continue
		}
		f, err := bind(one)
		if err != nil {
			return m, err
		}
		m.files, m.shared = append(m.files, f), append(m.shared, sharedMount{f, one.Attributes&unix.MOUNT_ATTR_RDONLY != 0})
	}
	return m, nil
}

func (m *mounts) close() {
	for _, f := range m.files {
		_ = f.Close()
	}
}

// mapOwners shows the files of root as those of the user namespace's root, and the others accordingly. Not every file system can do that. What
// the container only reads, and every user may read, is passed as it is then: its owner appears as a user that does not exist.
func (m *mounts) mapOwners(users *os.File) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())}
	for _, s := range m.shared {
		err := unix.MountSetattr(int(s.file.Fd()), "", unix.AT_EMPTY_PATH, &attr)
		if errors.Is(err, unix.EINVAL) {
			err = s.unmapped()
		}
		if err != nil {
			return &os.PathError{Op: "mapping the owners of", Path: s.file.Name(), Err: err}
		}
	}
	return nil
}

// unmapped returns nil if a container can use the mount although its owners cannot be mapped.
func (s sharedMount) unmapped() error {
	var st unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &st); err != nil {
		return err
	}
	var needed uint32 = 0o004
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		needed = 0o005
	}
	lack := "the container writes to it"
	if s.readOnly {
		if st.Mode&needed == needed {
			return nil
		}
		lack = fmt.Sprintf("its mode is %04o, so that not every user may read it", st.Mode&0o7777)
	}
	return fmt.Errorf("its file system has no id-mapped mounts (a tmpfs has them since Linux 6.3), and %s: "+
		"keep it on another file system, or set userNamespace: Disabled in the pool: %w", lack, errdefs.ErrFailedPrecondition)
}

func bind(m plan.Mount) (*os.File, error) {
	fail := func(err error) error { return &os.PathError{Op: "mounting", Path: m.Source, Err: err} }
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fail(err)
	}
	f := os.NewFile(uintptr(fd), m.Source)
	attr := unix.MountAttr{Attr_set: m.Attributes, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		_ = f.Close()
		return nil, fail(err)
	}
	return f, nil
}

// newMount mounts a new file system. Options are separated by commas.
func newMount(kind, options string, attributes uint64) (*os.File, error) {
	fail := func(err error) error { return fmt.Errorf("mounting %s: %w", kind, err) }
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fail(err)
	}
	defer func() { _ = unix.Close(fs) }()
	for o := range strings.SplitSeq(options, ",") {
		key, value, _ := strings.Cut(o, "=")
		if key == "" {
			continue
		}
		if err := unix.FsconfigSetString(fs, key, value); err != nil {
			return nil, fail(err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fail(err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(attributes))
	if err != nil {
		return nil, fail(err)
	}
	return os.NewFile(uintptr(fd), kind), nil
}

// devices mounts a container's /dev, with the nodes and links in it, for the root of a user namespace. Inside of that the nodes could not be
// made, and those of a file system that was mounted there could not be opened.
func devices(m plan.Mount, owner int) (f *os.File, err error) {
	f, err = newMount("tmpfs", fmt.Sprintf("%s,uid=%d,gid=%d", m.Options, owner, owner), m.Attributes)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	dir := int(f.Fd())
	for _, d := range [...]struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}} {
		const mode = 0o666
		err := unix.Mknodat(dir, d.name, unix.S_IFCHR|mode, int(unix.Mkdev(d.major, d.minor)))
		if err == nil { // the umask is that of the program
			err = unix.Fchmodat(dir, d.name, mode, 0)
		}
		if err == nil {
			err = unix.Fchownat(dir, d.name, owner, owner, unix.AT_SYMLINK_NOFOLLOW)
		}
		if err != nil {
			return nil, &os.PathError{Op: "creating", Path: "/dev/" + d.name, Err: err}
		}
	}
	for _, l := range [...]struct{ target, name string }{
		{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}, {"/proc/kcore", "core"},
	} {
		err := unix.Symlinkat(l.target, dir, l.name)
		if err == nil {
			err = unix.Fchownat(dir, l.name, owner, owner, unix.AT_SYMLINK_NOFOLLOW)
		}
		if err != nil {
			return nil, &os.PathError{Op: "creating", Path: "/dev/" + l.name, Err: err}
		}
	}
	return f, nil
}

package wire

// Setup is what a shim tells sandbox-init at its start: what to make of the namespaces that it was cloned into. The shim writes it, as a
// frame, to the socket that init has as SetupFD. Init answers ready or failure there, and then waits for its claim.
//
// The first of the descriptors that follow SetupFD is a mount of the root, which is attached nowhere; the others are named by index.
type Setup struct {
	Hostname string
	// Mounts are made in this order, below the root.
	Mounts []SetupMount
	// Masked are hidden and Readonly are not writable, if they exist.
	Masked, Readonly []string
	// Loopback brings up the loopback interface of a network namespace of its own.
	Loopback bool

	// UserNamespace: init is in a user namespace of its own, and hands it to the agent with its hello.
	UserNamespace bool

	Capabilities Capabilities
	// Rlimits are set by init itself, which can always lower them. In a user namespace not even root of the node may do it for init without
	// CAP_SYS_RESOURCE, which a node may lack.
	Rlimits []Rlimit
}

// SetupMount is one mount of a Setup.
type SetupMount struct {
	// Destination is absolute, below the root.
	Destination string
	// Type and Data are those of mount(2); Type is empty for the mount with index FD, which is attached as it is.
	Type, Data string
	FD         uint32
	// Flags are the MS_* of mount(2).
	Flags uint64
}

// SetupFD is the descriptor of the socket to the shim.
const SetupFD = 3

const (
	tagSetupHostname     = critical | 1
	tagSetupMount        = critical | 2
	tagSetupMasked       = critical | 4
	tagSetupReadonly     = critical | 5
	tagSetupLoopback     = critical | 6
	tagSetupCapabilities = critical | 7
	tagSetupUsers        = critical | 8
	tagSetupRlimit       = critical | 9

	tagMountDestination = critical | 1
	tagMountType        = critical | 2
	tagMountData        = critical | 3
	tagMountFD          = critical | 4
	tagMountFlags       = critical | 5
)

// EncodeSetup returns the payload of a setup.
func EncodeSetup(s *Setup) ([]byte, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	b := appendField(make([]byte, 0, 4096), tagSetupHostname, s.Hostname)
	for _, m := range s.Mounts {
		e := appendField(nil, tagMountDestination, m.Destination)
		e = appendField(e, tagMountType, m.Type)
		e = appendField(e, tagMountData, m.Data)
		e = appendNumber(e, tagMountFD, m.FD)
		e = appendField(e, tagMountFlags, string(appendUint64(nil, m.Flags)))
		b = appendField(b, tagSetupMount, string(e))
	}
	for _, p := range s.Masked {
		b = appendField(b, tagSetupMasked, p)
	}
	for _, p := range s.Readonly {
		b = appendField(b, tagSetupReadonly, p)
	}
	if s.Loopback {
		b = appendField(b, tagSetupLoopback, "\x01")
	}
	if s.UserNamespace {
		b = appendField(b, tagSetupUsers, "\x01")
	}
	for _, r := range s.Rlimits {
		b = appendField(b, tagSetupRlimit, r.encode())
	}
	return appendField(b, tagSetupCapabilities, s.Capabilities.encode()), nil
}

// DecodeSetup reads a setup. Its strings are parts of the payload. The error is a Failure.
func DecodeSetup(payload string) (*Setup, error) {
	s := &Setup{}
	err := fields(payload, s.decode)
	if err == nil {
		err = s.validate()
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Setup) decode(t tag, value string) (bool, error) {
	switch t {
	case tagSetupHostname:
		s.Hostname = value
	case tagSetupMount:
		return true, s.decodeMount(value)
	case tagSetupMasked, tagSetupReadonly:
		list := &s.Masked
		if t == tagSetupReadonly {
			list = &s.Readonly
		}
		if len(*list) == MaxMounts {
			return true, tooManyMounts()
		}
		*list = append(*list, value)
	case tagSetupLoopback:
		s.Loopback = value != "\x00"
	case tagSetupCapabilities:
		return true, s.Capabilities.decode(value)
	case tagSetupRlimit:
		return true, decodeRlimit(value, &s.Rlimits)
	case tagSetupUsers:
		s.UserNamespace = value != "\x00"
	default:
		return false, nil
	}
	return true, nil
}

func (s *Setup) decodeMount(value string) error {
	if len(s.Mounts) == MaxMounts {
		return tooManyMounts()
	}
	var m SetupMount
	err := fields(value, func(t tag, value string) (bool, error) {
		switch t {
		case tagMountDestination:
			m.Destination = value
		case tagMountType:
			m.Type = value
		case tagMountData:
			m.Data = value
		case tagMountFD:
			return true, number(value, &m.FD)
		case tagMountFlags:
			if len(value) != 8 {
				return true, malformed("a mount's flags are not eight bytes long")
			}
			m.Flags = parseUint64(value)
		default:
			return false, nil
		}
		return true, nil
	})
	s.Mounts = append(s.Mounts, m)
	return err
}

func (s *Setup) validate() error {
	if len(s.Hostname) > maxName || hasZero(s.Hostname) {
		return malformed("the host name is too long")
	}
	if len(s.Mounts) > MaxMounts || len(s.Masked) > MaxMounts || len(s.Readonly) > MaxMounts {
		return tooManyMounts()
	}
	if len(s.Rlimits) > maxRlimits {
		return tooManyRlimits()
	}
	for _, m := range s.Mounts {
		if !isPath(m.Destination) || hasZero(m.Type) || hasZero(m.Data) {
			return malformed("a mount point is not an absolute path")
		}
	}
	for _, list := range [][]string{s.Masked, s.Readonly} {
		for _, p := range list {
			if !isPath(p) {
				return malformed("a path is not absolute")
			}
		}
	}
	return nil
}

package wire

// All fields of version 1 are critical, except those that a slot may ignore.
const (
	tagArg          = critical | 1
	tagEnv          = critical | 2
	tagCwd          = critical | 3
	tagUID          = critical | 4
	tagGID          = critical | 5
	tagGroups       = critical | 6
	tagHostname     = critical | 7
	tagCapabilities = critical | 8
	tagNoNewPrivs   = critical | 9
	tagRlimit       = critical | 10
	tagSeccomp      = critical | 11
	tagSeccompFlags = critical | 12
	tagAppArmor     = critical | 13
	tagOOMScoreAdj  = critical | 14
	tagUmask        = critical | 15
	tagMount        = critical | 16
	tagKeepAlive    = critical | 17
)

// The fields of a mount.
const (
	tagDestination = critical | 1
	tagPath        = critical | 2
	tagFD          = critical | 3
	tagDir         = critical | 4
	tagAttributes  = critical | 5
)

// EncodeClaim returns the payload of a claim. The error is a Failure if a slot would refuse the claim.
func EncodeClaim(c *Claim) ([]byte, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	size := 1024 + len(c.Seccomp)
	for _, list := range [][]string{c.Args, c.Env} {
		for _, s := range list {
			size += fieldHeader + len(s)
		}
	}
	b := make([]byte, 0, size)
	for _, a := range c.Args {
		b = appendField(b, tagArg, a)
	}
	for _, e := range c.Env {
		b = appendField(b, tagEnv, e)
	}
	b = appendFlag(b, tagKeepAlive, c.KeepAlive)
	b = appendField(b, tagCwd, c.Cwd)
	b = appendNumber(b, tagUID, c.UID)
	b = appendNumber(b, tagGID, c.GID)
	groups := make([]byte, 0, 4*len(c.Groups))
	for _, g := range c.Groups {
		groups = appendUint32(groups, g)
	}
	b = appendField(b, tagGroups, string(groups))
	if c.Hostname != "" {
		b = appendField(b, tagHostname, c.Hostname)
	}
	b = c.appendConfinement(b)
	for _, m := range c.Mounts {
		b = appendField(b, tagMount, string(m.encode()))
	}
	if len(b) > MaxMessage {
		return nil, tooLong()
	}
	return b, nil
}

func (c *Claim) appendConfinement(b []byte) []byte {
	b = appendField(b, tagCapabilities, c.Capabilities.encode())
	if c.NoNewPrivs {
		b = appendField(b, tagNoNewPrivs, "\x01")
	}
	for _, r := range c.Rlimits {
		b = appendField(b, tagRlimit, r.encode())
	}
	if len(c.Seccomp) > 0 {
		b = appendField(b, tagSeccomp, string(c.Seccomp))
		b = appendNumber(b, tagSeccompFlags, c.SeccompFlags)
	}
	if c.AppArmorProfile != "" {
		b = appendField(b, tagAppArmor, c.AppArmorProfile)
	}
	if c.OOMScoreAdj != nil {
		b = appendNumber(b, tagOOMScoreAdj, uint32(*c.OOMScoreAdj))
	}
	if c.Umask != nil {
		b = appendNumber(b, tagUmask, *c.Umask)
	}
	return b
}

func (c *Capabilities) encode() string {
	var sets []byte
	for _, set := range []uint64{c.Bounding, c.Effective, c.Permitted, c.Inheritable, c.Ambient} {
		sets = appendUint64(sets, set)
	}
	return string(sets)
}

func (c *Capabilities) decode(value string) error {
	if len(value) != 40 {
		return malformed("the capabilities are not five sets")
	}
	for i, set := range []*uint64{&c.Bounding, &c.Effective, &c.Permitted, &c.Inheritable, &c.Ambient} {
		*set = parseUint64(value[8*i:])
	}
	return nil
}

func (r Rlimit) encode() string {
	return string(appendUint64(appendUint64(appendUint32(nil, r.Resource), r.Soft), r.Hard))
}

func decodeRlimit(value string, to *[]Rlimit) error {
	if len(value) != 20 {
		return malformed("a limit is not a resource and two values")
	}
	if len(*to) == maxRlimits {
		return tooManyRlimits()
	}
	*to = append(*to, Rlimit{Resource: parseUint32(value), Soft: parseUint64(value[4:]), Hard: parseUint64(value[12:])})
	return nil
}

func (m Mount) encode() []byte {
	b := appendField(nil, tagDestination, m.Destination)
	if m.Path != "" {
		b = appendField(b, tagPath, m.Path)
	} else {
		b = appendNumber(b, tagFD, m.FD)
	}
	if m.Dir {
		b = appendField(b, tagDir, "\x01")
	}
	return appendField(b, tagAttributes, string(appendUint64(nil, m.Attributes)))
}

// DecodeClaim reads a claim. Its strings are parts of the payload. The error is a Failure.
func DecodeClaim(payload string) (*Claim, error) {
	c := &Claim{}
	err := fields(payload, func(t tag, value string) (bool, error) {
		switch t {
		case tagArg:
			c.Args = append(c.Args, value)
		case tagEnv:
			c.Env = append(c.Env, value)
		case tagCwd:
			c.Cwd = value
		case tagHostname:
			c.Hostname = value
		case tagUID:
			return true, number(value, &c.UID)
		case tagGID:
			return true, number(value, &c.GID)
		case tagGroups:
			return true, c.decodeGroups(value)
		case tagMount:
			return true, c.decodeMount(value)
		case tagKeepAlive:
			c.KeepAlive = flag(value)
		default:
			return c.decodeConfinement(t, value)
		}
		return true, nil
	})
	if err == nil {
		err = c.validate()
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Claim) decodeConfinement(t tag, value string) (bool, error) {
	switch t {
	case tagCapabilities:
		return true, c.Capabilities.decode(value)
	case tagNoNewPrivs:
		c.NoNewPrivs = value != "\x00"
	case tagRlimit:
		return true, decodeRlimit(value, &c.Rlimits)
	case tagSeccomp:
		c.Seccomp = []byte(value)
	case tagSeccompFlags:
		return true, number(value, &c.SeccompFlags)
	case tagAppArmor:
		c.AppArmorProfile = value
	case tagOOMScoreAdj:
		var n uint32
		err := number(value, &n)
		adj := int32(n)
		c.OOMScoreAdj = &adj
		return true, err
	case tagUmask:
		c.Umask = new(uint32)
		return true, number(value, c.Umask)
	default:
		return false, nil
	}
	return true, nil
}

func (c *Claim) decodeGroups(value string) error {
	if len(value)%4 != 0 || len(value) > 4*maxGroups {
		return malformed("the groups are too many, or cut off")
	}
	c.Groups = make([]uint32, 0, len(value)/4)
	for ; len(value) > 0; value = value[4:] {
		c.Groups = append(c.Groups, parseUint32(value))
	}
	return nil
}

func (c *Claim) decodeMount(value string) error {
	if len(c.Mounts) == MaxMounts { // before they take much more memory than the message
		return tooManyMounts()
	}
	var m Mount
	err := fields(value, func(t tag, value string) (bool, error) {
		switch t {
		case tagDestination:
			m.Destination = value
		case tagPath:
			m.Path = value
		case tagFD:
			return true, number(value, &m.FD)
		case tagDir:
			m.Dir = value != "\x00"
		case tagAttributes:
			if len(value) != 8 {
				return true, malformed("a mount's attributes are not eight bytes long")
			}
			m.Attributes = parseUint64(value)
		default:
			return false, nil
		}
		return true, nil
	})
	c.Mounts = append(c.Mounts, m)
	return err
}

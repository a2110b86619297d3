package seccomp

import (
	"encoding/binary"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArgs   = 16
)

const (
	load        = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	and         = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	jump        = unix.BPF_JMP | unix.BPF_JA
	ifEqual     = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	ifGreater   = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	ifNotLess   = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	ifBits      = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	ret         = unix.BPF_RET | unix.BPF_K
	longestJump = 255
)

type instruction = unix.SockFilter

// program assembles the program: the check of the architecture, the checks of invalid numbers, and then a binary search, so
// that no system call executes more than about ten instructions before its own rules.
func program(a arch, fallback uint32, calls []call, limit uint32) []instruction {
	p := []instruction{
		{Code: load, K: offsetArch},
		{Code: ifEqual, Jt: 1, K: a.audit},
		{Code: ret, K: unix.SECCOMP_RET_KILL_THREAD},
		{Code: load, K: offsetNumber},
	}
	beyond := []instruction{{Code: ifGreater, Jf: 1, K: limit}, {Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}}
	switch {
	case limit > 0 && a.x32:
		p = append(p, instruction{Code: ifBits, Jt: uint8(len(beyond)), K: x32Bit})
		fallthrough
	case limit > 0:
		p = append(p, beyond...)
	}
	if a.x32 {
		// A tracer sets the number to -1 to skip a call.
		p = append(p, instruction{Code: ifNotLess, Jf: 2, K: x32Bit}, instruction{Code: ifEqual, Jt: 1, K: ^uint32(0)},
			instruction{Code: ret, K: unix.SECCOMP_RET_KILL_THREAD})
	}
	return append(p, search(spans(calls, fallback))...)
}

// span holds the rules of all numbers from start to the next span's.
type span struct {
	start uint32
	body  []instruction
}

func spans(calls []call, fallback uint32) []span {
	var list []span
	add := func(start uint32, body []instruction) {
		if n := len(list); n > 0 && slices.Equal(list[n-1].body, body) && len(body) == 1 {
			return
		}
		list = append(list, span{start, body})
	}
	other := []instruction{{Code: ret, K: fallback}}
	next := uint32(0)
	for _, c := range calls {
		if c.number > next {
			add(next, other)
		}
		add(c.number, body(c.rules, fallback))
		next = c.number + 1
	}
	add(next, other)
	return list
}

// search finds the span of the number that is loaded.
func search(list []span) []instruction {
	if len(list) == 1 {
		return list[0].body
	}
	middle := len(list) / 2
	below, above := search(list[:middle]), search(list[middle:])
	p := []instruction{{Code: ifNotLess, Jt: uint8(min(len(below), longestJump)), K: list[middle].start}}
	if len(below) > longestJump {
		p = []instruction{{Code: ifNotLess, Jf: 1, K: list[middle].start}, {Code: jump, K: uint32(len(below))}}
	}
	return slices.Concat(p, below, above)
}

// body evaluates the rules in order.
func body(rules []rule, fallback uint32) []instruction {
	p := []instruction{{Code: ret, K: fallback}}
	for _, r := range slices.Backward(rules) {
		if len(r.conditions) == 0 {
			p = []instruction{{Code: ret, K: r.action}}
			continue
		}
		// One rule is at most six conditions of seven instructions each, so that its end is within a jump's reach.
		q := []instruction{{Code: ret, K: r.action}}
		for _, c := range slices.Backward(r.conditions) {
			q = append(test(c, len(q)), q...)
		}
		p = append(q, p...)
	}
	return p
}

// test falls through if the condition holds, and otherwise jumps over the rest of its rule. Arguments are 64 bits wide and
// compared by halves; both architectures have the lower one first.
func test(c specs.LinuxSeccompArg, rest int) []instruction {
	low, high := uint32(offsetArgs+8*c.Index), uint32(offsetArgs+8*c.Index+4)
	wantLow, wantHigh := uint32(c.Value), uint32(c.Value>>32)
	// out jumps over the rest and the instructions of this test that follow, in itself the distance of a failed test.
	out := func(following int) uint8 { return uint8(rest + following) }
	switch c.Op {
	case specs.OpMaskedEqual:
		return []instruction{
			{Code: load, K: high}, {Code: and, K: wantHigh}, {Code: ifEqual, Jf: out(3), K: uint32(c.ValueTwo >> 32)},
			{Code: load, K: low}, {Code: and, K: wantLow}, {Code: ifEqual, Jf: out(0), K: uint32(c.ValueTwo)},
		}
	case specs.OpEqualTo:
		return []instruction{
			{Code: load, K: high}, {Code: ifEqual, Jf: out(2), K: wantHigh},
			{Code: load, K: low}, {Code: ifEqual, Jf: out(0), K: wantLow},
		}
	case specs.OpNotEqual:
		return []instruction{
			{Code: load, K: high}, {Code: ifEqual, Jf: 2, K: wantHigh},
			{Code: load, K: low}, {Code: ifEqual, Jt: out(0), K: wantLow},
		}
	case specs.OpGreaterThan, specs.OpGreaterEqual:
		code := uint16(ifGreater)
		if c.Op == specs.OpGreaterEqual {
			code = ifNotLess
		}
		return []instruction{
			{Code: load, K: high}, {Code: ifGreater, Jt: 3, K: wantHigh}, {Code: ifEqual, Jf: out(2), K: wantHigh},
			{Code: load, K: low}, {Code: code, Jf: out(0), K: wantLow},
		}
	default: // OpLessThan, OpLessEqual
		code := uint16(ifNotLess)
		if c.Op == specs.OpLessEqual {
			code = ifGreater
		}
		return []instruction{
			{Code: load, K: high}, {Code: ifGreater, Jt: out(3), K: wantHigh}, {Code: ifEqual, Jf: 2, K: wantHigh},
			{Code: load, K: low}, {Code: code, Jt: out(0), K: wantLow},
		}
	}
}

func encode(p []instruction) []byte {
	b := make([]byte, 0, 8*len(p))
	for _, i := range p {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b
}

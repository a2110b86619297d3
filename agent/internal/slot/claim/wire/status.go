package wire

import "syscall"

const (
	tagVersion tag = 1

	tagStage  tag = 1
	tagErrno  tag = 2
	tagDetail tag = 3
)

// EncodeHello returns the payload of hello.
func EncodeHello(version uint32) []byte { return appendNumber(nil, tagVersion, version) }

// DecodeHello reads the version that the other side speaks.
func DecodeHello(payload string) (uint32, error) {
	var version uint32
	err := fields(payload, func(t tag, value string) (bool, error) {
		if t != tagVersion {
			return false, nil
		}
		return true, number(value, &version)
	})
	if err == nil && version == 0 {
		err = malformed("the greeting has no version")
	}
	return version, err
}

// EncodeFailure returns the payload of a failure.
func EncodeFailure(f *Failure) []byte {
	detail := f.Detail
	if len(detail) > maxDetail {
		detail = detail[:maxDetail]
	}
	b := appendNumber(nil, tagStage, uint32(f.Stage))
	b = appendNumber(b, tagErrno, uint32(f.Errno))
	return appendField(b, tagDetail, detail)
}

// DecodeFailure reads a failure. A stage of a later version is StageUnknown.
func DecodeFailure(payload string) (*Failure, error) {
	var f Failure
	err := fields(payload, func(t tag, value string) (bool, error) {
		var n uint32
		switch t {
		case tagStage:
			err := number(value, &n)
			if n < uint32(len(stages)) {
				f.Stage = Stage(n)
			}
			return true, err
		case tagErrno:
			err := number(value, &n)
			f.Errno = syscall.Errno(n & 0xfff) // the kernel has no larger one
			return true, err
		case tagDetail:
			f.Detail = value[:min(len(value), maxDetail)]
			return true, nil
		}
		return false, nil
	})
	if err != nil {
		return nil, err
	}
	return &f, nil
}

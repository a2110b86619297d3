package ctrd

import "encoding/json"

// GroupAnnotation in a container's OCI spec names the container in whose shim it was started: the first of a group of slots. It
// is an annotation of the CRI plugin that containerd's shims interpret.
const GroupAnnotation = "io.kubernetes.cri.sandbox-id"

// spec is the part of an OCI spec that a removal needs.
type spec struct {
	Annotations map[string]string `json:"annotations"`
	Linux       struct {
		CgroupsPath string `json:"cgroupsPath"`
		UIDMappings []struct {
			HostID uint32 `json:"hostID"`
		} `json:"uidMappings"`
	} `json:"linux"`
}

// firstID returns the first id of the container's range; zero if it has no user namespace.
func (s spec) firstID() uint32 {
	if len(s.Linux.UIDMappings) == 0 {
		return 0
	}
	return s.Linux.UIDMappings[0].HostID
}

// parseSpec decodes an OCI spec; one that cannot be decoded is empty.
func parseSpec(raw []byte) spec {
	var s spec
	if json.Unmarshal(raw, &s) != nil {
		return spec{}
	}
	return s
}
